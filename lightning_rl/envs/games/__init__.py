"""Games by id: two-player games, as many copies in one array operation or as one copy with PettingZoo's API, and games of groups.

| id | game |
|---|---|
| `lightning_rl.envs.games.tic_tac_toe` | three in a row on 3 x 3 |
| `lightning_rl.envs.games.connect_four` | four in a row on 6 x 7, pieces fall to the ground |
| `lightning_rl.envs.games.rock_paper_scissors` | both move once, simultaneously |
| `lightning_rl.envs.games.biased_rock_paper_scissors` | the same, and rock against scissors counts double |
| `lightning_rl.envs.games.kuhn_poker` | three cards, one bet, hidden information |
| `lightning_rl.envs.games.sacrifice` | a group of two: one sacrifices itself, which earns the other a reward later |
| `lightning_rl.envs.games.walkers` | a group whose members each walk to a goal; the last one to arrive is paid |

Scripted players are in `players.py`, exact evaluation by game trees in `judges.py`.
"""

from functools import partial

from lightning_rl.envs.games.game import Game
from lightning_rl.envs.games.groups import Sacrifice, Walkers
from lightning_rl.envs.games.one_copy import make_one_copy
from lightning_rl.envs.games.two_players import BiasedRockPaperScissors, ConnectFour, KuhnPoker, RockPaperScissors, TicTacToe

tic_tac_toe = partial(make_one_copy, TicTacToe)
connect_four = partial(make_one_copy, ConnectFour)
rock_paper_scissors = partial(make_one_copy, RockPaperScissors)
biased_rock_paper_scissors = partial(make_one_copy, BiasedRockPaperScissors)
kuhn_poker = partial(make_one_copy, KuhnPoker)
sacrifice, walkers = Sacrifice, Walkers

GAMES: dict[str, type[Game]] = {
    f"{__name__}.{game.name}": game for game in (TicTacToe, ConnectFour, RockPaperScissors, BiasedRockPaperScissors, KuhnPoker)
}
"""Two-player games by id."""
