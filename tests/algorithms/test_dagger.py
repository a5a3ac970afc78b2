"""DAgger: a teacher's actions where the student got to."""

from __future__ import annotations

import pytest
import torch

from lightning_rl import DQN, GRU, PPO, BehavioralCloning, DAgger, SettingError, Trainer
from tests.fitting import REPLAY, Rows, fit, tiny, weights

SCRIPTED, BOX = "tests.environments:Scripted-v0", "tests.environments:ScriptedBox-v0"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Checkpoints of policies that learned for a moment."""
    root = tmp_path_factory.mktemp("teachers")
    made = {
        "choices": (PPO, SCRIPTED, {}),
        "box": (PPO, BOX, {}),
        "memory": (PPO, SCRIPTED, {"memory": GRU(4, 4)}),
        "dqn": (DQN, SCRIPTED, {}),
        "apart": (PPO, SCRIPTED, {"share_encoder": False}),
        "cartpole": (PPO, "CartPole-v1", {}),
    }
    for name, (algorithm, env_id, settings) in made.items():
        trainer = Trainer(default_root_dir=root / name, evaluation=None, enable_progress_bar=False)
        trainer.fit(tiny(algorithm, env_id, max_env_steps=32, **settings))
    return {name: str(next((root / name).glob("*/*/version_0/checkpoints/last.ckpt"))) for name in made}


def student(teacher, env_id=SCRIPTED, **settings):
    return tiny(DAgger, env_id, teacher=teacher, **REPLAY | settings)


def learned(*arguments, **settings):
    model = student(*arguments, **settings)
    fit(model)
    return weights(model)


@pytest.mark.parametrize("name, env_id", [("choices", SCRIPTED), ("dqn", SCRIPTED), ("box", BOX)])
def test_what_is_imitated_is_the_most_likely_action_of_the_teacher_where_the_student_was(teachers, name, env_id):
    model = student(teachers[name], env_id)
    seen = []
    learn = model.learn
    model.learn = lambda batch: (seen.append(batch), learn(batch))
    fit(model)
    teacher = model.labels.network
    for batch in seen:
        action = teacher.sample(batch.obs, deterministic=True)[0]
        expected = torch.as_tensor(model.network.distribution.from_env(teacher.distribution.to_env(action.numpy())))
        assert torch.equal(batch.action, expected.to(batch.action.dtype))
    assert len(seen) == model.updates > 0


@pytest.mark.thorough
def test_a_student_agrees_with_its_teacher_in_the_end(teachers):
    model = student(teachers["choices"], max_env_steps=3000, learning_rate=0.02, batch_size=64)
    logger = Rows()
    fit(model, logger=logger)
    accuracies = [row["train/accuracy"] for _, row in logger.rows if "train/accuracy" in row]
    assert accuracies[0] < 0.9 < 0.95 < accuracies[-1]  # on the observations that the student gets to


def test_the_student_acts_and_its_weights_are_all_that_is_stored(teachers):
    model = student(teachers["choices"])
    fit(model)
    assert model.env_steps == 96
    assert set(model.state_dict()) == set(tiny(DAgger, teacher="nowhere", **REPLAY).state_dict())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "option",
    [
        {"label_smoothing": 0.2},
        {"ent_coef": 0.1},
        {"memory": GRU(4, 4)},
        {"gradient_steps": 2},
        {"buffer_size": 30},
        {"learning_starts": 24},
    ],
    ids=str,
)
def test_every_option_of_dagger_changes_what_is_learned(teachers, option):
    changed, plain = learned(teachers["choices"], **option), learned(teachers["choices"])
    assert changed.shape != plain.shape or not torch.equal(changed, plain)


@pytest.mark.thorough
@pytest.mark.parametrize("option", [{"loss": "mse"}, {"action_dist": "tanh_normal"}, {"log_std_init": -1.0}], ids=str)
def test_every_option_of_dagger_for_box_actions_changes_what_is_learned(teachers, option):
    assert not torch.equal(learned(teachers["box"], BOX, **option), learned(teachers["box"], BOX))


@pytest.mark.thorough
def test_the_first_steps_are_those_of_the_policy_or_random_ones(teachers):
    cartpole = teachers["cartpole"], "CartPole-v1"
    assert not torch.equal(learned(*cartpole, warmup="random"), learned(*cartpole))


@pytest.mark.thorough
def test_another_teacher_is_another_lesson(teachers):
    assert not torch.equal(learned(teachers["dqn"]), learned(teachers["choices"]))


@pytest.mark.parametrize(
    "name, env_id, line",
    [
        ("memory", SCRIPTED, "has a memory"),
        ("box", SCRIPTED, "was trained with other observations or actions"),
        ("nowhere", SCRIPTED, "^teacher 'nowhere' is neither a run's folder nor a checkpoint$"),
        (None, SCRIPTED, r"^teacher must be the folder of a run \(trainer\.run_folder\), a checkpoint or a shared agent, got None$"),
        (3, SCRIPTED, r"^teacher must be the folder of a run \(trainer\.run_folder\), a checkpoint or a shared agent, got 3$"),
    ],
)
def test_a_teacher_that_cannot_teach_is_one_line(teachers, name, env_id, line):
    with pytest.raises(SettingError, match=line):
        fit(student(teachers.get(name, name), env_id))


def test_priorities_need_values(teachers):
    with pytest.raises(SettingError, match=r"replay\.prioritized needs TD errors"):
        student(teachers["choices"], replay={"prioritized": True})


@pytest.mark.thorough
def test_ppo_begins_with_a_student(teachers, tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False)
    trainer.fit(model := student(teachers["choices"]))
    (run,) = tmp_path.glob("DAgger/*/version_0")
    begun = tiny(PPO, learning_rate=0.0)
    Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False).fit(begun, init_from=run)
    assert torch.equal(weights(begun)[: len(weights(model)) // 2], weights(model)[: len(weights(model)) // 2])


def test_cloning_knows_no_teacher():
    with pytest.raises(SettingError, match="teacher is not a setting of BehavioralCloning"):
        BehavioralCloning("CartPole-v1", dataset="a/b-v0", teacher="x")


def test_a_teacher_whose_networks_share_no_encoder_has_no_memory(teachers):
    model = student(teachers["apart"])
    fit(model)
    assert model.updates > 0
