"""Agents of a scene are rows: seats, ends and beginnings in one message, players that fail."""

import json

import numpy as np
import pytest

from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.unity.scene import find_log_folder
from lightning_rl.errors import SettingError
from lightning_rl.processes.children import WorkerError
from tests.unity.scenes import PUSH, agent, ended, find_players, step


def test_statistics_of_a_scene_are_metrics_as_it_wants_them_combined(opened):
    mean, last, total = 0, 1, 2
    stepper = opened(
        [agent(7, 1)],
        [agent(7, 2, stats=[["height", 2.0, mean], ["level", 1.0, last], ["goals", 1.0, total]])],
        [agent(7, 3, stats=[["height", 4.0, mean], ["level", 3.0, last], ["goals", 5.0, total], ["goals", 0.5, total]])],
        [agent(7, 4)],
    )
    stepper.reset(seed=0)
    assert stepper.stats == {}
    step(stepper)
    assert stepper.stats == {"scene/height": 2.0, "scene/level": 1.0, "scene/goals": 1.0}
    for _ in range(2):
        step(stepper)
    assert stepper.stats == {"scene/height": 3.0, "scene/level": 3.0, "scene/goals": 6.5}


@pytest.mark.thorough
def test_the_mean_of_a_statistic_is_that_of_its_last_hundred_values(opened):
    stepper = opened([agent(7, 1)], [agent(7, 1, stats=[["height", 101.0, 0]])], [agent(7, 1, stats=[["height", 1.0, 0]])])
    stepper.reset(seed=0)
    for _ in range(100):
        step(stepper)
    assert stepper.stats == {"scene/height": 2.0}
    step(stepper)
    assert stepper.stats == {"scene/height": 1.0}


@pytest.mark.thorough
def test_an_agent_that_ends_and_asks_in_one_message_keeps_its_row(opened):
    stepper = opened(
        [agent(7, 1), agent(9, 2)],
        [agent(7, 3, reward=0.5, group_reward=0.25), ended(9, 4, -1.0), agent(9, 5, reward=8.0)],
        [agent(7, 6, reward=1.0), agent(9, 7, reward=2.0)],
    )
    assert stepper.side.agents == ["Push/0/0", "Push/0/1"]
    assert stepper.reset(seed=0)[0].tolist() == [[1], [2]]
    first = step(stepper)
    assert first.obs.tolist() == [[3], [5]]
    assert first.reward.tolist() == [0.75, -1.0], "the reward before the first decision of an episode belongs to none"
    assert (first.terminated.tolist(), first.truncated.tolist()) == ([False, True], [False, False])
    assert (first.ended.tolist(), first.final_obs.tolist()) == ([1], [[4]])
    assert (first.valid.tolist(), first.episode_start.tolist()) == ([True, True], [False, True])
    second = step(stepper)
    assert second.reward.tolist() == [1.0, 2.0]
    assert not second.episode_start.any()


@pytest.mark.thorough
def test_ends_alone_are_kept_for_the_next_message_with_requests(opened):
    stepper = opened(
        [agent(0, 1), agent(1, 2)],
        [ended(1, 3, 5.0, interrupted=True)],
        [agent(0, 4, reward=1.0)],
        [agent(0, 5, reward=1.0), agent(1, 6)],
        [agent(0, 7), agent(1, 8, reward=3.0)],
    )
    stepper.reset(seed=0)
    first = step(stepper)
    assert first.reward.tolist() == [1.0, 5.0]
    assert (first.truncated.tolist(), first.terminated.tolist()) == ([False, True], [False, False])
    assert (stepper.present.tolist(), first.obs.tolist()) == ([True, False], [[4], [0]])
    second = step(stepper)
    assert second.valid.tolist() == [True, False], "nobody acts in the row of an absent agent"
    assert (second.episode_start.tolist(), second.obs.tolist()) == ([False, True], [[5], [6]])
    third = step(stepper)
    assert (third.valid.tolist(), third.reward.tolist()) == ([True, True], [0.0, 3.0])


@pytest.mark.thorough
def test_a_new_id_takes_the_seat_of_an_agent_that_ended(opened):
    stepper = opened(
        [agent(0, 1), agent(1, 2)],
        [agent(0, 3), ended(1, 4, 1.0), agent(2, 5)],
        [agent(0, 6), agent(2, 7, reward=2.0)],
    )
    stepper.reset(seed=0)
    first = step(stepper)
    assert (first.ended.tolist(), first.obs.tolist()) == ([1], [[3], [5]])
    assert step(stepper).reward.tolist() == [0.0, 2.0]


@pytest.mark.thorough
def test_an_end_of_an_agent_that_never_asked_is_ignored(opened):
    stepper = opened([agent(0, 1)], [agent(0, 2), ended(5, 3, 9.0)], [agent(0, 3), ended(0, 3, 1.0), ended(0, 4, 9.0)])
    stepper.reset(seed=0)
    first = step(stepper)
    assert (first.ended.tolist(), first.reward.tolist()) == ([], [0.0])


@pytest.mark.thorough
def test_more_agents_than_seats_are_refused(opened):
    stepper = opened([agent(0, 1)], [agent(0, 2), agent(1, 3)])
    stepper.reset(seed=0)
    with pytest.raises(SettingError, match=r"^2 agents of Push are present, and there are 1 seats: set env.kwargs.seats$"):
        step(stepper)


@pytest.mark.thorough
def test_seats_may_be_more_than_the_first_agents(opened):
    stepper = opened([agent(0, 1)], [agent(0, 2), agent(1, 3)], kwargs={"seats": 3})
    stepper.reset(seed=0)
    first = step(stepper)
    assert first.obs.tolist() == [[2], [3], [0]]
    assert stepper.present.tolist() == [True, True, False]


@pytest.mark.thorough
def test_agents_that_decide_at_different_ticks_are_refused(opened):
    stepper = opened([agent(0, 1), agent(1, 2)], [agent(1, 3)])
    stepper.reset(seed=0)
    words = (
        r"agents of Push decide at different ticks \(seat 0 waits while seat 1 asks\): give their Decision Requesters one period and step"
    )
    with pytest.raises(SettingError, match=words):
        step(stepper)


@pytest.mark.thorough
def test_two_teams_of_a_behavior_are_rows_of_one_policy(opened):
    stepper = opened({"Push?team=0": [agent(0, 1)], "Push?team=1": [agent(1, 2), agent(2, 3)]})
    assert stepper.side.agents == ["Push/0/0", "Push/1/0", "Push/1/1"]
    assert stepper.reset(seed=0)[0].tolist() == [[1], [2], [3]]


@pytest.mark.thorough
def test_one_of_several_behaviors_is_chosen(opened):
    both = {"Push?team=0": [agent(0, 1)], "Pull?team=0": [agent(1, 2)]}
    with pytest.raises(
        SettingError, match=r"the scene has the behaviors Pull and Push: choose one with env.kwargs.behavior, or train each with MultiAgent"
    ):
        opened(both)
    stepper = opened(both, {"Push?team=0": [agent(0, 1)], "Pull?team=0": []}, both, kwargs={"behavior": "Pull"})
    assert stepper.reset(seed=0)[0].tolist() == [[2]]
    assert step(stepper).obs.tolist() == [[2]], "the message in which only others ask is answered at once"


@pytest.mark.thorough
def test_a_behavior_that_appears_late_is_refused(opened):
    stepper = opened([agent(0, 1)], {PUSH: [agent(0, 2)], "Late?team=0": [agent(1, 3)]})
    stepper.reset(seed=0)
    with pytest.raises(SettingError, match=r"the behavior Late\?team=0 appeared after the first message; choose .* env.kwargs.behavior"):
        step(stepper)


def test_members_of_a_group_have_rows_next_to_one_another(opened):
    stepper = opened(
        [agent(0, 1, group=8), agent(1, 2, group=5), agent(2, 3, group=8), agent(3, 4)],
        [agent(1, 5, group=5), ended(2, 6, 0.0), agent(9, 7, group=5), agent(0, 8, group=8), agent(3, 9)],
        by_group=True,
    )
    assert (stepper.side.spaces.groups, stepper.side.spaces.group_size) == (3, 2)
    assert stepper.side.agents == ["Push/0/0", "Push/0/1", "Push/0/2", "Push/0/3", "Push/0/4", "Push/0/5"]
    assert stepper.reset(seed=0)[0].tolist() == [[1], [3], [2], [0], [4], [0]], "groups 8 and 5, and an agent without a group"
    assert stepper.present.tolist() == [True, True, True, False, True, False]
    second = step(stepper)
    assert second.obs.tolist() == [[8], [0], [5], [7], [9], [0]], "a member that joins its group sits with it"
    assert (second.ended.tolist(), stepper.present.tolist()) == ([1], [True, False, True, True, True, False])


@pytest.mark.thorough
def test_a_group_is_paid_once_and_its_members_their_own_reward_too(opened):
    shared = {"group": 1, "group_reward": 0.5}
    messages = (
        [agent(0, 1, group=1), agent(1, 2, group=1), agent(2, 3, group=2)],
        [agent(0, 4, reward=0.25, **shared), agent(1, 5, reward=-0.25, **shared), agent(2, 6, group=2, group_reward=2.0)],
    )
    one_by_one, stepper = opened(*messages), opened(*messages, by_group=True)
    for each, rewards in ((one_by_one, [0.75, 0.25, 2.0]), (stepper, [0.75, -0.25, 2.0, 0.0])):
        each.reset(seed=0)
        assert step(each).reward.tolist() == rewards


@pytest.mark.thorough
def test_a_member_that_goes_on_tells_what_its_group_was_paid(opened):
    stepper = opened(
        [agent(0, 1, group=1), agent(1, 2, group=1)],
        [agent(0, 3, group=1, reward=1.0, group_reward=0.5, done=True)],
        [agent(1, 4, group=1, group_reward=0.75), agent(0, 5, group=1, group_reward=9.0)],
        [agent(1, 6, group=1, group_reward=1.0, done=True)],
        [agent(0, 7, group=1, group_reward=2.0, done=True)],
        [agent(0, 8, group=1), agent(1, 8, group=1)],
        by_group=True,
    )
    stepper.reset(seed=0)
    first = step(stepper)
    assert (first.ended.tolist(), first.reward.tolist()) == ([0], [1.0, 0.75]), "what it was paid until the later message"
    assert (first.episode_start.tolist(), first.obs.tolist()) == ([True, False], [[5], [4]]), "a member may come back at once"
    second = step(stepper)
    assert (second.ended.tolist(), second.reward.tolist()) == ([0, 1], [2.0, 0.0]), "of those that ended, the last"


@pytest.mark.thorough
def test_a_new_group_takes_the_rows_of_one_that_is_gone(opened):
    stepper = opened(
        [agent(0, 1, group=1), agent(1, 2, group=2)],
        [ended(0, 3, 1.0), agent(7, 4, group=3), agent(1, 5, group=2)],
        [agent(7, 6, group=3), agent(1, 7, group=2), agent(8, 8, group=4)],
        by_group=True,
    )
    stepper.reset(seed=0)
    assert step(stepper).obs.tolist() == [[4], [5]]
    with pytest.raises(SettingError, match=r"^3 groups of Push are present, and there are seats of 2: let all of them ask in the first"):
        step(stepper)


@pytest.mark.thorough
def test_a_group_with_more_members_than_at_first_needs_seats(opened):
    messages = [agent(0, 1, group=1), agent(1, 2, group=2)], [agent(0, 3, group=1), agent(1, 4, group=2), agent(2, 5, group=2)]
    stepper = opened(*messages, by_group=True)
    stepper.reset(seed=0)
    with pytest.raises(SettingError, match=r"^2 agents of a group of Push are present, and there are 1 seats: set env.kwargs.seats$"):
        step(stepper)
    stepper = opened(*messages, by_group=True, kwargs={"seats": 2})
    stepper.reset(seed=0)
    assert step(stepper).obs.tolist() == [[3], [0], [4], [5]]


@pytest.mark.thorough
def test_a_reset_abandons_the_episodes(opened):
    stepper = opened([agent(0, 1)], [agent(0, 2, reward=5.0)], [agent(0, 3)])
    stepper.reset(seed=0)
    step(stepper)
    began = stepper.restart_all()
    assert (began.obs.tolist(), began.reward.tolist(), began.valid.tolist()) == ([[1]], [0.0], [False])
    assert began.episode_start.all()
    assert step(stepper).reward.tolist() == [5.0]


@pytest.mark.thorough
def test_a_player_that_is_killed_is_started_again(opened, tmp_path):
    stepper = opened(arguments=("--scene", "ball", "--count", 2, "--crash-at", 3))
    stepper.reset(seed=0)
    action = np.zeros((2, 2), dtype=np.float32)
    assert stepper.step(action).valid.all()
    lost = stepper.step(action)
    assert (lost.valid.any(), lost.episode_start.all(), lost.ended.tolist()) == (False, True, []), "nobody knows what the actions did"
    (notice,) = stepper.notices
    assert notice.startswith("player 0 of unity:") and "was restarted: Scene.x86_64 was ended by SIGKILL" in notice
    assert stepper.restarts == 1
    assert stepper.step(action).reward == pytest.approx([0.1, 0.1])
    assert len(find_players(tmp_path / "Player-0.log")) == 1


@pytest.mark.thorough
def test_a_player_that_fails_too_often_ends_the_run(opened):
    stepper = opened(arguments=("--scene", "ball", "--count", 1, "--crash-at", 3), max_restarts=1)
    stepper.reset(seed=0)
    with pytest.raises(
        WorkerError, match=r"player 0 of unity:.* failed more than 1 times in an hour; last: Scene.x86_64 was ended by SIGKILL"
    ):
        for _ in range(10):
            stepper.step(np.zeros((1, 2), dtype=np.float32))


@pytest.mark.thorough
def test_players_simulate_at_the_same_time(opened):
    import time

    stepper = opened(arguments=("--scene", "ball", "--count", 1, "--sleep", 0.05), num_envs=4)
    stepper.reset(seed=0)
    began = time.monotonic()
    for _ in range(10):
        stepper.step(np.zeros((4, 2), dtype=np.float32))
    assert time.monotonic() - began < 4 * 10 * 0.05 / 2


@pytest.mark.thorough
def test_parameters_and_engine_settings_reach_every_player(opened, tmp_path):
    uniform = {"sampler_type": "uniform", "sampler_parameters": {"min_value": 0, "max_value": 2, "seed": 3}}
    log = tmp_path / "sent"
    stepper = opened(
        arguments=("--scene", "ball", "--count", 1, "--log", log),
        parameters={"wind": uniform, "level": 2.0},
        kwargs={"time_scale": 5.0, "num_areas": 3},
        num_envs=2,
    )
    stepper.reset(seed=0)
    stepper.close()
    sent = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["parameters"] for each in sent] == [{"wind": ["uniform", 3, [0.0, 2.0]], "level": 2.0}] * 2
    assert sent[0]["engine"] == {"0": [84, 84], "1": [5], "2": [5.0], "3": [-1], "4": [60]}
    assert {each["areas"] for each in sent} == {3}
    assert len({each["seed"] for each in sent}) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"id": "unity", "num_envs": 2}, "env.id unity: the editor is one player; env.num_envs must be 1"),
        ({"max_episode_steps": 5}, "env.max_episode_steps: set Max Step of the agents in Unity"),
        ({"vectorization": "async"}, "env.vectorization async is for environments of one agent"),
        ({"step_timeout": 5.0}, "env.step_timeout: a Unity scene has env.kwargs.timeout_wait"),
        ({"kwargs": {"timescale": 5}}, r"env.kwargs.timescale .*did you mean time_scale"),
        ({"frame_stack": 4}, "env.frame_stack is for environments of one agent"),
    ],
)
def test_settings_of_other_environments_are_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        EnvConfig(**{"id": "unity:Scene", "num_envs": 1, **settings})


def test_logs_have_a_folder_of_their_own_by_default(tmp_path):
    assert find_log_folder(None).is_dir()
    assert find_log_folder(str(tmp_path / "logs")) == tmp_path / "logs"


def test_a_folder_of_logs_is_that_of_the_current_folder_and_made_again(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert find_log_folder("logs") == tmp_path / name / "logs"
        assert (tmp_path / name / "logs").is_dir()
