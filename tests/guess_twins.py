"""The same life twice, without guesses and with guesses that never hold: no step may differ.

INVARIANTS.md says what G3 and the others are."""
import random
from toy import alone
from world import draw_world, live_on
from guessers import Wrong

def diary(w):
    "What each step of a world is, and the order in which blocks with a name will be taken"
    pages, s, pool = [], w.s, w.s.blocks.pool
    plan_of, update = s.schedule, s.update
    def schedule(now):
        p = plan_of(now)
        who = [[r.request_id for r in rs] for rs in (p.admitted, p.preempted, p.paused, p.expired)]
        shares = [(x.request.request_id, x.start, x.stop) for x in p.scheduled]
        padding = [(x.num_tokens, x.context_len) for x in p.padding]
        moves = [len(x) for x in (p.swap_out, p.swap_in, p.copies)]
        pages.append([now, who, p.found, shares, padding, moves, p.num_waiting, s.blocks.num_hit, s.next_wakeup])
        return p
    def updated(plan, out, now):
        done = update(plan, out, now)
        line = [pool.name_of[b] for b in pool.free_ids if b in pool.name_of]
        pages[-1] += [[r.request_id for r in done], pool.num_free_blocks, line, sorted(pool.by_name)]
        return done
    s.schedule, s.update = schedule, updated
    return pages

def told(seed, **more):
    rng = random.Random(seed)
    w = draw_world(rng, **more)
    pages = diary(w)
    return pages, live_on(w, rng)

def twins(seed):
    "The same world without guesses and with wrong ones; how much was guessed, and lent for it"
    when, most = ['always', 'pays'][seed % 2], seed % 8 + 1
    (ours, w), (theirs, _) = told(seed, guesser=Wrong(alone, seed=seed), guess_when=when, most=most), told(seed)
    for i, (a, b) in enumerate(zip(ours, theirs)): assert a == b, f'step {i}'                         # G3
    assert len(ours) == len(theirs)
    assert not any(r.num_accepted for r in w.all)
    return sum(r.num_guessed for r in w.all), w.preempted, w.hits
