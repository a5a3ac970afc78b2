"""Help and wrong names are told before torch is imported; the names come from source files and are those that run."""

from __future__ import annotations

import subprocess
import sys
from pydoc import locate

import pytest
import yaml
from pytorch_lightning import Trainer as LightningTrainer

import lightning_rl
from lightning_rl import MODELS
from lightning_rl.cli.parsers import FORMATS, PARSERS, ZOO_ALGORITHMS, tune_parser
from lightning_rl.errors import SettingError
from lightning_rl.exporting import export
from lightning_rl.importers import zoo_settings
from lightning_rl.settings.names import NAMES_IN_OTHER_LIBRARIES, PARTS, SECTIONS, settings_of_model, settings_of_section, suggest_algorithm
from lightning_rl.training.arguments import settings_of
from lightning_rl.training.loading import algorithm_class
from lightning_rl.tuning.study import StudySettings

PROBE = (
    "import sys\nfrom lightning_rl.cli.main import main\ntry: code = main(sys.argv[1:])\nexcept SystemExit as error: code = error.code\n"
)
PROBE += "sys.exit(10 * ('torch' in sys.modules) + (code or 0))"


@pytest.mark.parametrize("name", MODELS)
def test_names_in_the_source_of_an_algorithm_are_its_settings(name):
    assert set(settings_of_model(name)) == settings_of(getattr(lightning_rl, name)).keys() - {"spaces"}


@pytest.mark.parametrize(("section", "path"), [*SECTIONS.items(), *PARTS.items()])
def test_names_in_the_source_of_a_section_are_its_settings(section, path):
    assert set(settings_of_section(section)) == settings_of(locate(path)).keys()


def test_names_in_the_source_of_the_trainers_are_their_flags():
    both = settings_of(LightningTrainer).keys() | settings_of(lightning_rl.Trainer).keys()
    assert set(settings_of_section("trainer")) == both - SECTIONS.keys()


def test_help_names_the_formats_and_the_algorithms_that_there_are():
    assert list(export.FORMATS) == list(FORMATS)
    assert list(zoo_settings.ALGORITHMS) == list(ZOO_ALGORITHMS)


def test_the_defaults_of_tune_are_those_of_a_study():
    defaults = vars(tune_parser().parse_known_args([])[0])
    assert {name: defaults[name] for name in vars(StudySettings())} == vars(StudySettings())


@pytest.mark.parametrize(("name", "here"), NAMES_IN_OTHER_LIBRARIES.items())
def test_the_name_of_an_algorithm_in_other_libraries_is_answered_with_settings_that_exist_here(name, here):
    with pytest.raises(SettingError, match=f"there is no algorithm '{name.upper()}' .*; here it is {here}$"):
        algorithm_class(name.upper(), lightning_rl.Algorithm)
    algorithm, _, settings = here.partition(" with ")
    assert ":" not in settings or yaml.safe_load(f"{{{settings}}}").keys() <= {*settings_of_model(algorithm)}


def test_an_algorithm_of_another_library_may_be_written_with_punctuation():
    assert suggest_algorithm("QR-DQN", MODELS) == "; here it is DQN with distribution: quantiles"
    assert suggest_algorithm("PP0", MODELS) == "; did you mean PPO?"


@pytest.mark.variants
@pytest.mark.parametrize("arguments", ["fit --help", "tune --help", *(f"{name} --help" for name in PARSERS)])
def test_help_needs_no_torch(arguments):
    assert subprocess.run([sys.executable, "-c", PROBE, *arguments.split()], capture_output=True).returncode == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("fit --config ppo/cartpole --model.n_step 3", "did you mean n_steps?"),
        ("fit --model SAC --model.replay.alphaa 3", "did you mean alpha?"),
        ("fit --config ppo/cartpole --trainer.max_tim 3", "did you mean max_time?"),
        ("fit --config ppo/cartpole --evaluation.episode 3", "did you mean episodes?"),
        ("fit --config ppo/cartpol", "did you mean"),
        ("evaluate --ckpt_pth runs", "did you mean --ckpt_path?"),
        ("export", "--ckpt_path"),
        ("fitt", "did you mean fit?"),
        ("fit --config ppo/cartpole --seeds x", "--seeds must be a number of runs, such as 4, or a list of seeds"),
        ("tune --config ppo/cartpole --trial 3", "--trial is not an option of tune; did you mean trials?"),
        ("tune --config ppo/cartpole --model.n_step 3", "did you mean n_steps?"),
    ],
)
def test_a_wrong_option_is_reported_without_loading_torch(arguments, told):
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments.split()], capture_output=True, text=True)
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ev", "evaluate"),
        ("fit --model.n_st", "--model.n_steps"),
        ("fit --model.env.num_e", "--model.env.num_envs"),
        ("fit --evaluation.max_sh", "--evaluation.max_share"),
        ("fit --model SA", "SAC"),
        ("tune --config ppo/cartpole_", "ppo/cartpole_curriculum"),
        ("evaluate --episo", "--episodes"),
        ("fit --job", "--jobs"),
    ],
)
def test_a_shell_completes_subcommands_options_and_values(words, completed, script):
    line = ["lightning-rl", *words.split()]
    ask = f'COMP_WORDS=({" ".join(line)}); COMP_CWORD={len(line) - 1}; _shtab_lightning_rl; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"source {script}; {ask}"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{completed}\n", "")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """What `lightning-rl completion bash` prints, without loading torch."""
    done = subprocess.run([sys.executable, "-c", PROBE, "completion", "bash"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    file = tmp_path_factory.mktemp("completion") / "lightning-rl.bash"
    file.write_text(done.stdout)
    return file
