"""Any mix of requests, each with its own number of tokens, in one forward pass without a single padded row."""

__all__ = ['Wanted', 'wanted', 'Moves', 'Batch', 'pack']

import torch
from dataclasses import dataclass, field
from typing import NamedTuple
from fastcore.basics import patch
from .core import Padding, Plan, Request, Scheduled
from .kv_blocks import slot_mapping
from .paged_attention import AttnMeta

class Wanted(NamedTuple):
    "What a row of logits is wanted for"
    request:Request
    position:int               # of the token whose row it is; the row speaks of the next
    draft:tuple[int, ...] = () # guesses between the request's own tokens and the one to choose
    scores:bool = False        # it scores a token of the prompt, instead of choosing one

def _in_order(plan:Plan)->list[Scheduled]:
    "Shares as they are packed: those of one token first"
    return sorted(plan.scheduled, key=lambda s: s.num_tokens > 1)

def _choosing(s:Scheduled)->list[Wanted]:
    return [Wanted(s.request, s.stop - 1 + j, s.draft[:j]) for j in range(s.rows)]

def _scoring(s:Scheduled)->range:
    "Positions whose rows score the next token of the prompt"
    if s.request.params.prompt_logprobs is None: return range(0)
    return range(s.start, min(s.stop, len(s.request.prompt_ids) - 1))

def wanted(plan:Plan)->list[Wanted]:
    "The rows of a step, in order: those that choose a token, then those that score one"
    shares = _in_order(plan)
    scores = [Wanted(s.request, i, scores=True) for s in shares for i in _scoring(s)]
    return [w for s in shares for w in _choosing(s)] + scores

Pairs = list[tuple[int, int]]

class Moves(NamedTuple):
    "Blocks to move before a step, in this order"
    swap_out:Pairs   # (block, host block)
    swap_in:Pairs    # (host block, block)
    copies:Pairs     # (from block, to block)

@dataclass
class Batch:
    "A step, packed for a device: tensors and integers, nobody's name"
    input_ids:torch.Tensor     # [1, T]
    position_ids:torch.Tensor  # [1, T]
    meta:AttnMeta
    logit_rows:torch.Tensor    # [S] rows of T whose logits are wanted, in the order of `wanted`
    moves:Moves

@dataclass
class _Rows:
    "The rows of a step while they are laid side by side"
    block_size:int
    ids:list[int] = field(default_factory=list)
    positions:list[int] = field(default_factory=list)
    slots:list[int] = field(default_factory=list)        # where each token's KV goes
    query_lens:list[int] = field(default_factory=list)   # of each request
    seq_lens:list[int] = field(default_factory=list)
    tables:list[list[int]] = field(default_factory=list)

    def add(self, ids:list[int], start:int, table:list[int])->int: # first row
        "Append the tokens of one request, from position `start` on"
        at, stop = len(self.ids), start + len(ids)
        self.ids += ids
        self.positions += range(start, stop)
        self.slots += slot_mapping(table, start, stop, self.block_size)
        self.query_lens.append(len(ids))
        self.seq_lens.append(stop)
        self.tables.append(table)
        return at

@patch
def pad(self:_Rows, p:Padding, max_position:int):
    "Append rows for nobody; their KV goes nowhere"
    end = min(p.context_len, max_position)
    self.ids += [0] * p.num_tokens
    self.positions += [max(0, i) for i in range(end - p.num_tokens, end)]
    self.slots += [-1] * p.num_tokens
    self.query_lens.append(p.num_tokens)
    self.seq_lens.append(end)
    self.tables.append([])

@patch
def table(self:_Rows)->list[list[int]]:
    "Block tables as a rectangle, the null block 0 beyond a request's end"
    width = max((-(-n // self.block_size) for n in self.seq_lens), default=0)
    return [t[:width] + [0] * (width - len(t)) for t in self.tables]

def pack(
    plan:Plan,
    block_size:int,         # tokens per block
    device:torch.device|str='cpu',
    max_position:int=1<<30, # positions that the model has; padding is cut to it
    moved:bool=False,       # the moves have been done already
)->Batch:
    "Lay the tokens of a step in one row and note what belongs where"
    rows, choose, score = _Rows(block_size), list[int](), list[int]()
    for s in _in_order(plan):
        at = rows.add(s.request.tokens(s.start, s.stop) + list(s.draft), s.start, s.request.block_table)
        choose += range(len(rows.ids) - s.rows, len(rows.ids))
        score += [at + i - s.start for i in _scoring(s)]
    for p in plan.padding: rows.pad(p, max_position)
    cuda = torch.device(device).type == 'cuda'
    def tensor(x): return torch.tensor(x, dtype=torch.long).to(device, non_blocking=cuda)
    meta = AttnMeta(rows.query_lens, rows.seq_lens, tensor(rows.table()), tensor(rows.slots), plan.num_padding)
    moves = Moves([], [], []) if moved else Moves(plan.swap_out, plan.swap_in, plan.copies)
    return Batch(tensor([rows.ids]), tensor([rows.positions]), meta, tensor(choose + score), moves)
