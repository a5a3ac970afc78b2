"""Who plays the seats that do not learn: what opponents see and return, and which are refused."""

import numpy as np
import pytest
import torch

import lightning_rl as lrl
from lightning_rl import DQN, PPO, SettingError
from lightning_rl.data.opponents import ScriptedOpponent
from lightning_rl.data.self_play import Snapshots
from lightning_rl.envs.games import GAMES
from lightning_rl.loggers import read_rows
from lightning_rl.matches import play_matches
from lightning_rl.training.experience import make_self_play_opponent
from tests.fitting import tiny

GAME = "lightning_rl.envs.games.tic_tac_toe"
MINIMAX = "lightning_rl.envs.games.players.minimax"
CALLS = []


def first_legal(obs, mask, random):
    CALLS.append(obs)
    return mask.argmax(1)


def whole_numbers(obs, mask, random):
    return np.ones((len(obs), 1), dtype=int)


def fit(model, folder, **settings):
    """Train, with a folder for the run, and return the trainer."""
    trainer = lrl.Trainer(enable_progress_bar=False, default_root_dir=folder, **{"evaluation": None} | settings)
    trainer.fit(model)
    return trainer


def game(env=GAME, cls=PPO, **settings):
    return cls({"id": env, "num_envs": 4}, **({"n_steps": 16, "batch_size": 16} if cls is PPO else {}), **settings)


def test_a_script_that_returns_whole_numbers_does_not_round_the_actions_of_policies():
    duel = game(
        "tests.agents.Duel",
        self_play={"save_steps": 16, "play_against_latest_model_ratio": 0.5, "opponents": [f"{__name__}.whole_numbers"]},
    )
    opponent = make_self_play_opponent(duel, 4)
    opponent.playing[:] = [-2, -1, -1, -1]
    rows = np.arange(4) * 2
    obs = np.zeros((4, *duel.spaces.observation.shape), np.float32)
    actions = opponent.act(obs, (), rows, np.ones(4, dtype=bool))
    assert actions.dtype == duel.spaces.action.dtype and actions[0] == 1.0
    assert not np.equal(actions[1:], np.round(actions[1:])).all()


@pytest.mark.parametrize(
    "chosen",
    [np.zeros(3, int), np.zeros((2, 1), int), np.zeros(2), "abc", torch.zeros(2, requires_grad=True)],
    ids=["many", "shape", "floats", "text", "gradient"],
)
def test_a_script_whose_actions_do_not_fit_is_refused_in_one_line(chosen):
    player = ScriptedOpponent(lambda obs, mask, random: chosen, "mine.player", game().spaces.action)
    with pytest.raises(SettingError, match=r"opponent mine\.player returned no actions of Discrete\(9\) for 2 observations"):
        player.act(np.zeros((2, 3, 3, 2)), np.ones((2, 9), bool), np.arange(2), np.ones(2, bool))


def fails(obs, mask, random):
    return obs.there_is_no_such_thing


def illegal(obs, mask, random):
    return mask.argmin(1)


@pytest.mark.parametrize(("player", "message"), [("fails", "raised AttributeError"), ("illegal", "returned the illegal action")])
def test_a_player_that_fails_or_moves_illegally_is_named_in_one_line(player, message):
    with pytest.raises(SettingError, match=rf"opponent .*{player}.* {message}"):
        lrl.evaluate(game(), 20, opponent=f"{__name__}.{player}")


@pytest.mark.thorough
def test_opponents_do_not_see_what_only_critics_get(tmp_path):
    CALLS.clear()
    model = game(
        critic_obs="all",
        self_play={"save_steps": 32, "play_against_latest_model_ratio": 0.0, "opponents": [f"{__name__}.first_legal"]},
        max_env_steps=256,
    )
    trainer = fit(model, tmp_path)
    assert CALLS and all(obs.shape[1:] == (3, 3, 2) for obs in CALLS)
    found = lrl.evaluate(model, 4, opponent=trainer.run_folder / "checkpoints" / "last.ckpt")
    assert 0 <= found["win_rate"] <= 1
    assert 0 <= lrl.evaluate(model, 4, opponent=f"{__name__}.first_legal")["win_rate"] <= 1


def test_a_snapshot_of_dqn_explores_as_it_did_after_resuming_too():
    model = game(cls=DQN, self_play={"save_steps": 100}, exploration_initial_eps=0.75, buffer_size=100)
    snapshots = Snapshots(model.network, 4)
    snapshots.take()
    model.network.distribution.epsilon = 0.25
    snapshots.take()
    restored = Snapshots(model.network, 4)
    restored.set_weights(snapshots.get_weights([0, 1]))
    assert [restored.get_network(number).distribution.epsilon for number in (0, 1)] == [0.75, 0.25]


@pytest.mark.thorough
def test_every_row_of_the_log_holds_a_rating_also_if_each_iteration_ends_with_a_snapshot(tmp_path):
    model = game(self_play={"save_steps": 16, "play_against_latest_model_ratio": 0.0}, max_env_steps=512, log_interval=64)
    trainer = fit(model, tmp_path)
    rows = read_rows(trainer.run_folder / "metrics.csv")
    assert len(rows) > 4 and all(row["self_play/rating"] for row in rows[1:])


@pytest.mark.parametrize(
    "name", ["lightning_rl.envs.games.plyers.minimax", "lightning_rl.envs.games.tic_tac_toe", "os.kill", "shutil.rmtree", "numpy.zeros.x"]
)
def test_an_invalid_player_is_refused_in_one_line(name):
    with pytest.raises(SettingError, match="opponent"):
        lrl.evaluate(game(), 1, opponent=name)


@pytest.mark.parametrize("name", ["shutil.rmtree", "torch.load"])
def test_a_checkpoint_cannot_name_a_function_of_a_library_as_an_opponent(name, tmp_path):
    trainer = fit(game(self_play={"save_steps": 64, "opponents": ["random"]}, max_env_steps=64), tmp_path)
    file = trainer.run_folder / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(file, weights_only=False)
    checkpoint["hyper_parameters"]["self_play"]["opponents"] = [name]
    torch.save(checkpoint, tmp_path / "hostile.ckpt")
    with pytest.raises(SettingError, match=f"names {name} as an opponent, which is part of a library"):
        PPO.load_from_checkpoint(tmp_path / "hostile.ckpt")


def test_an_opponent_where_all_agents_learn_is_refused(tmp_path):
    with pytest.raises(SettingError, match="all agents of this environment learn, so there are no seats for it; add self_play"):
        lrl.evaluate(game("lightning_rl.envs.games.rock_paper_scissors"), 1, opponent=MINIMAX)
    with pytest.raises(SettingError, match="there are no seats for it"):
        fit(game("lightning_rl.envs.games.rock_paper_scissors", max_env_steps=64), tmp_path, evaluation={"opponent": MINIMAX})


def test_an_opponent_in_an_environment_without_seats_is_refused_before_it_is_loaded(tmp_path):
    with pytest.raises(SettingError, match="opponent no/run: this environment has no seats for opponents; leave it out"):
        lrl.evaluate(tiny(PPO, "CartPole-v1"), 1, opponent="no/run")


def test_the_random_player_is_not_a_folder_of_that_name(tmp_path, monkeypatch):
    fit(game(max_env_steps=64), tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random").mkdir()
    matches = play_matches([next(tmp_path.rglob("last.ckpt")), "random"], 2)
    assert matches.scores[0, 1].games == 2


def test_a_noisy_policy_is_evaluated_without_noise():
    model = game(cls=DQN, noisy=True, exploration_initial_eps=0.0, exploration_final_eps=0.0, buffer_size=100)
    model.network.train()
    judged = {lrl.data.opponents.find_exploitability(model.env, model.spaces, model.network, True)["exploitability"] for _ in range(2)}
    model.network.resample(torch.Generator().manual_seed(1))
    judged.add(lrl.data.opponents.find_exploitability(model.env, model.spaces, model.network, True)["exploitability"])
    assert len(judged) == 1 and model.network.training


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four", "kuhn_poker", "rock_paper_scissors"])
@pytest.mark.parametrize("action", [-1, 9])
def test_an_action_that_no_game_has_is_illegal(name, action):
    one = GAMES[f"lightning_rl.envs.games.{name}"](1)
    one.reset(seed=0)
    with pytest.raises(ValueError, match="actions are 0 to"):
        one.step(one.all, np.full((1,) if one.in_turn else (1, 2), action))


@pytest.mark.parametrize("share_encoder", [True, False])
def test_a_policy_without_a_memory_is_evaluated_whether_its_networks_share_their_encoder_or_not(share_encoder):
    model = game(share_encoder=share_encoder)
    assert "exploitability" in lrl.data.opponents.find_exploitability(model.env, model.spaces, model.network, True)


def last_legal(obs, mask, random):
    """Choose the last legal action."""
    return mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)


@pytest.mark.thorough
def test_functions_are_opponents_wherever_a_path_is_and_a_checkpoint_stores_their_paths(tmp_path, capsys):
    def local(obs, mask, random):
        return np.argmax(mask, axis=1)

    model = game(self_play={"opponents": [last_legal, local]}, max_env_steps=64)
    trainer = fit(model, tmp_path, evaluation={"opponent": last_legal})
    here, there = (f"{__name__}.{each.__qualname__}" for each in (last_legal, local))
    output = capsys.readouterr().out
    assert f"opponent {there} is a function that only this program knows" in output and f"opponent {here} is" not in output
    file = trainer.run_folder / "checkpoints" / "last.ckpt"
    assert torch.load(file, weights_only=True)["hyper_parameters"]["self_play"]["opponents"] == [here, there]
    assert PPO.load_from_checkpoint(file).self_play.opponents == [here, there]
    assert lrl.evaluate(model, 4, opponent=last_legal) == lrl.evaluate(model, 4, opponent=here)


def test_two_opponents_with_one_name_are_refused():
    with pytest.raises(SettingError, match="name a player twice"):
        lrl.SelfPlayConfig(opponents=[lambda obs, mask, random: 0, lambda obs, mask, random: 1])


@pytest.mark.parametrize("opponent", [3, None, np.ndarray])
def test_an_opponent_that_is_neither_a_name_nor_a_function_is_refused(opponent):
    with pytest.raises(SettingError, match="must be random, a run's folder, or a function or its path"):
        lrl.SelfPlayConfig(opponents=[opponent])


def test_random_moves_are_no_opponent_where_nobody_has_a_seat():
    with pytest.raises(SettingError, match="opponent random: this environment has no seats for opponents; leave it out"):
        lrl.evaluate(tiny(PPO, "CartPole-v1"), 1, opponent="random")
