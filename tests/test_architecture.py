"""The floors of the house: imports point down, and a few questions are asked in one place only."""

import ast
from configparser import ConfigParser
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import gymnasium.spaces

import lightning_rl

ROOT = Path(lightning_rl.__file__).parent
FLOORS = (
    {"types", "errors"},
    {"checkpoints", "processes"},
    {"nan_policy", "returns", "value_transforms", "schedules", "spaces"},
    {"distributions", "settings", "losses"},
    {"envs", "networks", "loggers"},
    {"optimization", "data", "reports"},
    {"rewards", "demonstrations", "actors", "sharing"},
    {"callbacks"},
    {"training"},
    {"algorithms"},
    {"policy"},
    {"exporting", "importers", "matches", "tuning"},
    {"cli"},
    {"__main__"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
OPTIONAL = {
    "ale_py",
    "minatar",
    "envpool",
    "cv2",
    "mujoco",
    "minari",
    "huggingface_hub",
    "h5py",
    "PIL",
    "ray",
    "moviepy",
    "minigrid",
    "pettingzoo",
}
OPTIONAL |= {"httpx2", "matplotlib", "rliable", "onnx", "onnxruntime", "imageio_ffmpeg", "IPython", "vmas", "grpc", "google"}
SPACE_CLASSES = {name for name in gymnasium.spaces.__all__ if isinstance(getattr(gymnasium.spaces, name), type)}


@cache
def modules():
    """The trees of all modules, by their names inside the package."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "__init__.py"
    }


@cache
def algorithms():
    """The bases of each algorithm, by the name of its module."""
    return {
        name: bases
        for name, tree in modules().items()
        if name.startswith("algorithms.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "Algorithm" in (bases := [ast.unparse(base) for base in node.bases])
    }


def room(module):
    return module.partition(".")[0]


def imports(tree):
    """The modules of this package that are imported, by their name inside it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, inside = name.partition(".")
            if package == "lightning_rl":
                yield inside


def upward_imports(name, tree):
    """Imports of another room that is not on a lower floor."""
    targets = {room(inside) for inside in imports(tree)} & FLOOR.keys() - {room(name)}
    return sorted(target for target in targets if FLOOR[target] >= FLOOR[room(name)])


def late_imports(tree):
    """Packages imported inside functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    nodes = [node for function in functions for node in ast.walk(function)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def space_questions(tree):
    """Classes of spaces that are asked for by `isinstance`, `issubclass` or `case`."""
    questions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            questions += node.args[1:]
        elif isinstance(node, ast.MatchClass):
            questions.append(node.cls)
    parts = [part for question in questions for part in ast.walk(question)]
    names = {part.id for part in parts if isinstance(part, ast.Name)} | {part.attr for part in parts if isinstance(part, ast.Attribute)}
    return names & SPACE_CLASSES


def test_every_module_has_a_floor():
    assert sorted({room(name) for name in modules()} - FLOOR.keys()) == []


def test_imports_point_down():
    found = {name: upward_imports(name, tree) for name, tree in modules().items()}
    assert {name: targets for name, targets in found.items() if targets} == {}


def test_no_imports_go_in_circles():
    below = {name: {target for inside in imports(tree) for target in (inside, inside.rpartition(".")[0]) if target in modules()} - {name}
             for name, tree in modules().items()}  # fmt: skip
    TopologicalSorter(below).prepare()  # raises CycleError, which names the circle


def test_only_optional_packages_are_imported_inside_functions():
    # `lightning-rl --version` answers without torch, and `tune` runs without Ray: what needs them is loaded once the arguments are read
    allowed = {name: OPTIONAL | {"lightning_rl"} if name in ("cli.main", "cli.tune") else OPTIONAL for name in modules()}
    found = {name: late_imports(tree) - allowed[name] for name, tree in modules().items()}
    assert {name: packages for name, packages in found.items() if packages} == {}


def test_only_spaces_and_distributions_ask_what_class_a_space_has():
    found = {name: space_questions(tree) for name, tree in modules().items() if room(name) not in ("spaces", "distributions")}
    assert {name: classes for name, classes in found.items() if classes} == {}


def test_an_algorithm_has_one_parent_besides_groups_of_settings_and_does_not_import_siblings():
    for name, bases in algorithms().items():
        assert [parent for parent in bases if not parent.endswith("Fields")] == ["Algorithm"], name
        known = {
            inside for inside in imports(modules()[name]) for sibling in algorithms().keys() - {name} if inside.startswith(f"{sibling}.")
        }
        assert known == set(), name


def test_an_installed_package_has_all_its_folders():
    setup = ConfigParser()
    setup.read(ROOT.parent / "setup.cfg")
    folders = {".".join(path.parent.relative_to(ROOT.parent).parts) for path in ROOT.rglob("__init__.py")}
    assert folders - set(setup["options"]["packages"].split()) == set()


def test_few_modules_stand_outside_rooms():
    assert len([name for name in modules() if not (ROOT / name.partition(".")[0]).is_dir()]) <= 12  # `__main__` among them


def test_the_package_stays_within_its_files():
    unity = [name for name in modules() if "unity" in name]
    assert len(modules()) + 1 - len(unity) <= 214
    assert len(unity) <= 11


def test_the_walk_finds_what_it_forbids():
    assert {"algorithms.ppo", "algorithms.a2c"} <= algorithms().keys()
    bad = ast.parse(
        "import lightning_rl.data.collector\n"
        "from lightning_rl import callbacks, errors\n"
        "from lightning_rl.envs.make import x\n"
        "def f(space):\n"
        "    import json.decoder\n"
        "    from cv2 import y\n"
        "    return isinstance(space, str | gym.spaces.Box) or isinstance(space, (Dict, int))\n"
    )
    assert upward_imports("networks.mlp", bad) == ["callbacks", "data", "envs"]
    assert upward_imports("cli", bad) == []
    assert late_imports(bad) == {"json", "cv2"}
    assert space_questions(bad) == {"Box", "Dict"}
    assert space_questions(modules()["spaces"]) >= {"Box", "Discrete"}
