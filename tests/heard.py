"Somebody who guesses what he has heard in an earlier run of the same people"
from cbatch.guesses import Guess, Guesser

class Heard(Guesser):
    "Listens as long as `said` is empty; then right but for each `wrong`th token, and never past what it has heard"
    def __init__(self, wrong=5): self.wrong, self.requests, self.said = wrong, [], {}
    def listen(self, serve):
        "Hear out a run, and give what it gives"
        got = serve(self)
        self.said = {tuple(r.prompt_ids): list(r.output_ids) for r in self.requests}
        self.requests = []
        return got
    def guess(self, r, most):
        n = len(r.output_ids)
        if not self.said:
            if r not in self.requests: self.requests.append(r)
            return Guess([])
        heard = self.said[tuple(r.prompt_ids)][n:n + most]
        return Guess([0 if (i + 1) % self.wrong == 0 else t for i, t in enumerate(heard, n)])
