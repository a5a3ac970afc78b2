"""Private attributes of other packages: few files use them, and each is listed here with a check that it still exists."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "lightning_rl"
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
PUBLIC = {"_replace", "_make", "_asdict", "_fields", "_exit"}
"""Documented names of NamedTuple and os."""
SAVER = "pytorch_lightning.callbacks.model_checkpoint"
USED = {
    "callbacks/evaluation.py": {"_results": "pytorch_lightning.trainer.trainer", "_current_fx_name": "pytorch_lightning.core.module"},
    "callbacks/stopping.py": {
        "_check_on_train_epoch_end": "pytorch_lightning.callbacks.early_stopping",
        **dict.fromkeys(("_save_on_train_epoch_end", "_every_n_epochs", "_every_n_train_steps", "_train_time_interval"), SAVER),
    },
    "envs/classic_control.py": {
        **dict.fromkeys(("_elapsed_steps", "_max_episode_steps"), "gymnasium.wrappers.common"),
        "_sutton_barto_reward": "gymnasium.envs.classic_control.cartpole",
    },
    "envs/snapshot/encoding.py": {
        "_saved_kwargs": "gymnasium.utils.record_constructor",
        "_cached_spec": "gymnasium.core",
        **dict.fromkeys(("_ezpickle_args", "_ezpickle_kwargs"), "gymnasium.utils.ezpickle"),
    },
    "envs/snapshot/vector.py": {"_autoreset_envs": "gymnasium.vector.sync_vector_env"},
    "envs/sync.py": {"_add_info": "gymnasium.vector.vector_env"},
    "loggers.py": dict.fromkeys(("_wandb_init", "_offline"), "pytorch_lightning.loggers.wandb"),
    "networks/changes.py": dict.fromkeys(("_global_forward_hooks", "_global_forward_pre_hooks"), "torch.nn.modules.module"),
    "optimization.py": {
        **dict.fromkeys(("_foreach_add_", "_fused_adam_"), "torch.optim.adam"),
        **dict.fromkeys(("_foreach_mul_", "_foreach_norm"), "torch.nn.utils.clip_grad"),
        **dict.fromkeys(("_foreach_sqrt", "_foreach_addcmul_", "_foreach_addcdiv_"), "torch.optim.rmsprop"),
        **dict.fromkeys(("_backward_hooks", "_post_accumulate_grad_hooks"), "torch._tensor"),
        **dict.fromkeys(("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"), "torch.optim.optimizer"),
        **dict.fromkeys(("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"), "torch.optim.optimizer"),
        "_is_profiler_enabled": "torch.autograd.profiler",
    },
    "training/compiling.py": {"_dynamo": "torch._dynamo"},
    "training/run.py": {"_batches_that_stepped": "pytorch_lightning.loops.training_epoch_loop"},
    "tuning/ray_population.py": dict.fromkeys(("_trial_state", "_perturbation_interval"), "ray.tune.schedulers.pbt"),
    "tuning/study.py": {"_trial_id": "optuna.trial"},
}
"""Files that use private attributes of other packages, and the modules that define these."""


def parse() -> dict[str, ast.Module]:
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def own_names(trees: dict[str, ast.Module]) -> set[str]:
    """Names that the package itself defines."""
    own = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
    return own


def private_names(tree: ast.Module) -> set[str]:
    """Private names that a file accesses as attributes, or imports."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found.add(name)
            case ast.ImportFrom(module=module, names=names) if module and not module.startswith("lightning_rl"):
                found |= {*module.split("."), *(each.name for each in names)}
    return {name for name in found if PRIVATE.fullmatch(name)} - PUBLIC


@pytest.mark.thorough
def test_private_attributes_of_other_packages_are_used_in_few_files_and_nowhere_else():
    trees = parse()
    own = own_names(trees)
    found = {file: private_names(tree) - own for file, tree in trees.items()}
    unlisted = {file: names - USED.get(file, {}).keys() for file, names in found.items()}
    assert not {file: names for file, names in unlisted.items() if names}
    assert len(USED) <= 13


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in USED.items() for name in names])
def test_a_private_attribute_is_used_in_its_file_and_still_stands_where_it_is_expected(file, name):
    assert name in (ROOT / file).read_text(), "no longer used: remove it from the list"
    module = USED[file][name]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    sources = Path(importlib.import_module(module).__file__)
    files = sources.parent.glob("*.py") if sources.name == "__init__.py" else [sources]
    assert any(re.search(rf"\b{name}\b", each.read_text()) for each in files), f"{module} has no {name} any more"
