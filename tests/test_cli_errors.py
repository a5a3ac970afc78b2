"""Every wrong input ends in one line that names the key, its value and the way out, and in exit status 2.

Where jsonargparse or Lightning explain what is wrong, their words are read: a new version of either may fail here.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_rl
from lightning_rl.cli.main import main
from lightning_rl.cli.settings import explain_flag
from lightning_rl.errors import SettingError
from tests.apart import Apart
from tests.command_line import MODULE, TINY, run, run_apart
from tests.fitting import fit as fit_plain
from tests.fitting import tiny
from tests.reports.folders import write_run

FIT = "fit --model PPO --model.env.id CartPole-v1 "
MINE = "fit --import mine --model PPO --model.env.id Mine-v0 "

MODEL = "model:\n  class_path: PPO\n  init_args:\n    env: CartPole-v1\n"
ERRORS = {
    "option: no such option, no value": [
        ("--model PPO --model.self_play.save_step 5", "model.self_play.save_step is not a setting; did you mean save_steps?"),
        ("--model PPO --model.memory LSTM --model.memory.size 5", "model.memory.size is not a setting of LSTM"),
        ("--modl PPO", "--modl", "did you mean model?"),
        ("--print_confg", "--print_confg", "did you mean print_config?"),
        ("--trianer.max_steps 3", "--trianer", "did you mean trainer?"),
        ("--trainer.max_step 3", "--trainer.max_step", "did you mean max_steps?"),
        ("--trainer.acc cpu", "--trainer.acc is not a setting", "did you mean accelerator?"),
        ("--trainer.xyz 3", "--trainer.xyz is not a setting", "lightning-rl fit --help"),
        ("--model.n_stps=3", "--model.n_stps", "did you mean n_steps?"),
        ("--model.n_step 3", "--model.n_step ", "did you mean n_steps?"),
        ("--model.init_args.n_stps 3", "--model.n_stps", "did you mean n_steps?"),
        ("--model.env.num_env 3", "--model.env.num_env", "did you mean num_envs?"),
        ("--model.env '{num_env: 3}'", "model.env.num_env", "did you mean num_envs?"),
        ("--evaluation.episode 3", "--evaluation.episode", "did you mean episodes?"),
        ("--evaluation nope", "evaluation must be a mapping", "'nope'"),
        ("--checkpoint.kep 3", "--checkpoint.kep", "did you mean keep?"),
        ("--model.n_steps", "--model.n_steps needs a value"),
        ("--model.n_steps=", "--model.n_steps needs a value"),
        ("--ckpt_path", "--ckpt_path needs a value"),
        ("--config", "--config needs a value"),
        ("--import", "--import: expected one argument"),
        ("--model.num_envs 4", "--model.num_envs is not a setting of PPO; here it is model.env.num_envs"),
        ("--model.n_envs 4", "--model.n_envs is not a setting of PPO; here it is model.env.num_envs"),
        ("--num_envs 4", "--num_envs is not a setting; here it is model.env.num_envs"),
        ("--learning_rate 1e-3", "--learning_rate is not a setting; here it is model.learning_rate"),
        ("--episodes 3", "--episodes is not a setting; here it is evaluation.episodes"),
        ("--seed 3", "--seed is not a setting; here it is seed_everything"),
        ("--model.device cpu", "--model.device is not a setting of PPO; here it is trainer.accelerator"),
        ("--trainer.max_env_steps 3", "--trainer.max_env_steps is not a setting; here it is model.max_env_steps"),
        ("--model SAC --model.n_epochs 4", "--model.n_epochs is not a setting of SAC, only of PPO, POCA, PQN"),
        ("--model.optimizer Adam", "--model.optimizer is not a setting of PPO; here it is configure_optimizers of a subclass"),
        ("garbage", "'garbage' is not an option", "start with --"),
        ("ppo/cartpole", "'ppo/cartpole' is not an option; write --config ppo/cartpole"),
        ("mine.yaml", "'mine.yaml' is not an option; write --config mine.yaml"),
        ("-x 3", "'-x' is not an option", "start with --"),
    ],
    "option: types": [
        ("--model.n_steps 1.5", "model.n_steps must be an integer", "1.5"),
        ("--model.learning_rate fast", "model.learning_rate must be a number", "fast"),
        ("--model.learning_rate nan", "model.learning_rate must be a number", "nan"),
        ("--model.max_env_steps 1e400", "model.max_env_steps must be an integer", "inf"),
        ("--model.net_arch [a]", "model.net_arch must be an integer", "got a"),
        ("--model.net_arch 64", "model.net_arch must be a list", "64"),
        ("--model.normalize_reward 3", "model.normalize_reward must be true or false", "3"),
        ("--model.env.num_envs many", "model.env.num_envs must be an integer", "many"),
        ("--model.env.kwargs 3", "model.env.kwargs must be a mapping", "3"),
        ("--model.env.wrappers ClipReward", "model.env.wrappers must be a list", "ClipReward"),
        ("--model.env.wrappers+=ClipReward --model.env.wrappers.min_reward 0", "arguments of a wrapper go into the list", "init_args"),
        ("--evaluation.deterministic maybe", "evaluation.deterministic must be true or false", "maybe"),
        ("--checkpoint.keep all", "checkpoint.keep must be an integer", "all"),
        ("--trainer.max_steps x", "trainer.max_steps must be an integer", "got x"),
        ("--seed_everything x", "seed_everything must be", "an integer", "got x"),
    ],
    "option: numbers out of range": [  # see RANGES
        ("--model.n_steps 0", "n_steps must be >= 1, got 0"),
        ("--model.batch_size 100", "batch_size 100 does not divide", "128 * 8 = 1024", "use 64 or 128"),
        ("--model.gamma 1.5", "error: model.gamma must be >= 0 and <= 1, got 1.5"),
        ("--model.target_kl 0", "target_kl must be > 0, got 0"),
        ("--model.env.num_envs 0", "env.num_envs must be >= 1, got 0"),
        ("--model.env.max_episode_steps 0", "env.max_episode_steps must be >= 1, got 0"),
        ("--model.env.frame_stack 0", "env.frame_stack must be >= 1, got 0"),
        ("--evaluation.every_n_env_steps 0", "evaluation.every_n_env_steps must be at least 1, got 0", "evaluation null"),
        ("--evaluation.episodes 0", "evaluation.episodes must be at least 1, got 0", "evaluation null"),
        ("--evaluation.num_envs 0", "evaluation.num_envs must be at least 1, got 0", "evaluation null"),
        ("--evaluation.seed -1", "evaluation.seed must be >= 0 and <= 4294967295, got -1"),
        ("--evaluation.max_episode_steps 0", "evaluation.max_episode_steps must be at least 1, got 0", "evaluation null"),
        ("--evaluation.patience 0", "evaluation.patience must be >= 1, got 0"),
        ("--checkpoint.every_n_env_steps 0", "checkpoint.every_n_env_steps must be >= 1, got 0"),
        ("--checkpoint.keep -2", "checkpoint.keep must be >= -1, got -2"),
        ("--seed_everything -4", "seed_everything must be >= 0", "got -4"),
    ],
    "option: choices": [
        ("--model PPX", "'PPX'", "did you mean PPO?"),
        ("--model.class_path PPX", "'PPX'", "did you mean PPO?"),
        ("--model no_module.PPO", "'no_module.PPO'", "current folder"),
        ("--model lightning_rl.Trainer", "'lightning_rl.Trainer' is not an algorithm", "subclass of lightning_rl.Algorithm"),
        ("--model.entities agents", "model.entities must be a list", "agents"),
        ("--model.entities [agents]", "entities: there is no observation 'agents'; choose from obs"),
        ("--model.entities [obs]", "entities: 'obs' has shape (4,); a set of entities is a Box of shape (max_n, features)"),
        ("--model.goals 3", "model.goals must be a list", "3"),
        ("--model.goals [ob]", "goals: there is no observation 'ob'; did you mean obs?"),
        ("--model.goals [obs] --model.net_arch []", "net_arch is empty, but goals need a hidden layer", "use net_arch [64]"),
        ("--model.encoder natur_cnn", "encoder must be one of auto, mlp", "'natur_cnn'", "did you mean nature_cnn?"),
        ("--model.activation rleu", "activation must be one of tanh", "'rleu'", "did you mean relu?"),
        ("--model.normalize_obs on", "normalize_obs must be one of off, running, frozen", "'on'"),
        ("--model.ratio joined", "model.ratio must be one of joint, per_part, per_dim", "joined", "did you mean joint?"),
        (
            "--model.action_dist tanh",
            "model.action_dist must be one of clipped_normal, tanh_normal",
            "got tanh",
            "did you mean tanh_normal?",
        ),
        ("--model.env.vectorization asink", "model.env.vectorization must be one of auto, sync, async", "asink", "did you mean async?"),
        ("--model.env.autoreset SAMESTEP", "model.env.autoreset must be one of", "SAMESTEP", "did you mean SAME_STEP?"),
    ],
    "option: what replays": [
        ("--model SAC --model.replay.alphaa 3", "model.replay.alphaa", "did you mean alpha?"),
        ("--model SAC --model.replay '{alphaa: 3}'", "model.replay.alphaa", "did you mean alpha?"),
        ("--model SAC --model.replay.prioritized true --model.replay.replace false", "replay.replace false", "replay.prioritized"),
        ("--model DQN --model.distribution c51 --model.v_min -.inf", "v_min", "-inf"),
        ("--model PPO --model.action_dist noisy", "model.action_dist", "noisy"),
        ("--model PPO --model.env CartPole-v1 --model.use_sde true", "use_sde adds noise to Box actions"),
        ("--model SAC --model.env CartPole-v1 --model.use_sde true", "use_sde adds noise to Box actions"),
        ("--model SAC --model.replay 3", "model.replay must be a mapping", "3"),
        ("--model SAC --model.replay.alpha 3", "replay.alpha must be >= 0 and <= 1, got 3"),
        ("--model SAC --model.replay.beta -1", "replay.beta must be >= 0 and <= 1, got -1"),
        ("--model SAC --model.replay.demonstration a/b-v0", "--model.replay.demonstration is not a setting; did you mean demonstrations?"),
        ("--model SAC --model.replay.demonstrations no/such-v0", "dataset 'no/such-v0' is neither in"),
        ("--model SAC --model.replay.demonstration_share 0.5", "demonstration_share 0.5 needs demonstrations: name replay.demonstrations"),
        (
            "--model SAC --model.replay.demonstrations a/b-v0 --model.replay.demonstration_share 1",
            "replay.demonstration_share must be a number > 0 and < 1, got 1",
        ),
        (
            "--model DQN --model.behavioral_cloning.steps 3",
            "--model.behavioral_cloning is not a setting of DQN, only of PPO, A2C, IMPALA, POCA, SAC, TQC, CrossQ, TD3",
        ),
        ("--model PPO --model.behavioral_cloning.stepps 3", "--model.behavioral_cloning.stepps is not a setting; did you mean steps?"),
        ("--model PPO --model.behavioral_cloning.steps 3", "behavioral_cloning.demo_path is missing: name a Minari dataset"),
        ("--model PPO --model.behavioral_cloning.demo_path a/b-v0", "dataset 'a/b-v0' is neither in", "lightning-rl collect makes one"),
        ("--model PPO --model.reward_signals.gail.demo_path 3", "reward_signals.gail.demo_path must be the name of a dataset"),
        ("--model PPO --model.reward_signals.rdn.strength 3", "reward_signals.rdn is not a reward signal; did you mean rnd?"),
        ("--model PPO --model.reward_signals.rnd.encoder cnn", "reward_signals.rnd: encoder must be one of"),
        ("--model PPO --model.reward_signal_steps_per_update 3", "reward_signal_steps_per_update: no reward signal learns"),
        ("--model PPO --evaluation null --checkpoint.monitor train/loss", "checkpoint.monitor 'train/loss' needs evaluations"),
        ("--model BehavioralCloning --model.dataset a/b-v0 --model.loss mse", "loss mse is for Box actions, not for Discrete(2)"),
        ("--model SAC --model.buffer_sise 3", "--model.buffer_sise", "did you mean buffer_size?"),
        ("--model SAC --model.buffer_size 15", "buffer_size must be at least num_envs * (n_steps + 1) = 8 * 2 = 16, got 15"),
        (
            "--model SAC --model.buffer_size 27 --model.n_steps 3 --model.env.num_envs 7",
            "buffer_size must be at least num_envs * (n_steps + 1) = 7 * 4 = 28, got 27",
        ),
        (
            "--model SAC --model.buffer_size 1e12",
            "replay buffer: 1,000,000,000,000 transitions",
            "90 % of this machine's",
            "lower buffer_size",
        ),
        (
            "--model SAC --model.buffer_size 1e12 --model.replay.directory rows",
            "the disk of replay.directory rows has",
            "lower buffer_size",
        ),
        ("--model SAC --model.warmup rndom", "model.warmup must be one of random, policy", "rndom", "did you mean random?"),
        ("--model SAC --model.ent_coef auto_x", "ent_coef 'auto_x' must be a number, auto, or auto_<initial value>"),
        ("--model SAC --model.ent_coef auto_0", "ent_coef must be > 0, got 0"),
        ("--model SAC --model.target_entropy high", "target_entropy 'high' must be auto, or a number for each kind", "{discrete: …}"),
        ("--model SAC --model.target_entropy '{continuous: 3}'", "target_entropy.continuous: the actions are discrete"),
        ("--model SAC --model.learning_starts 1 --model.replay.replace false", "256 rows without replacement of 8: raise learning_starts"),
        ("--model SAC --model.distribution c51", "--model.distribution is not a setting"),
        ("--model DQN --model.distribution c52", "model.distribution must be one of none, c51, quantiles", "c52", "did you mean c51?"),
        ("--model DQN --model.value_transform symlogg", "model.value_transform must be one of identity", "symlogg", "did you mean symlog?"),
        ("--model DQN --model.distribution c51 --model.v_min 3 --model.v_max 3", "v_min 3.0 must be below v_max 3.0"),
        ("--model DQN --model.distribution c51 --model.n_atoms 1", "n_atoms must be >= 2, got 1"),
        ("--model DQN --model.distribution quantiles --model.n_quantiles 0", "n_quantiles must be >= 1, got 0"),
        ("--model DQN --model.env.id Pendulum-v1", "DQN and PQN need a Discrete action space, got Box(1,)", "SAC, TD3 or PPO"),
        ("--model TD3", "TD3 needs a Box action space, got Discrete(2)", "SAC or PPO"),
    ],
    "option: environments": [
        (
            "--model.env.id Mien-v0",
            "env.id 'Mien-v0' is not a registered environment (your own: its_module:Mien-v0, or --import its_module)",
        ),
        ("--model.env.id CartPol-v1", "env.id 'CartPol-v1'", "did you mean CartPole-v1?"),
        ("--model.env.id CartPole-v9", "env.id 'CartPole-v9'", "did you mean CartPole-v1?"),
        ("--model.env.id nowhere:Env-v0", "nowhere:Env-v0", "No module named 'nowhere'"),
        ("--trainer null", "trainer must be a mapping of settings, got nothing"),
        ("--model.memory '{class_path: LSTM, init_args: 5}'", "model.memory.init_args must be a mapping"),
        ("--model.env.kwargs.gravty 3", "CartPole-v1", "env.kwargs are {'gravty': 3}"),
        ("--model.env.wrappers [ClipRewrd]", "env.wrappers", "ClipRewrd", "did you mean ClipReward?"),
        ("--model.env.wrappers [NormalizeObservation]", "NormalizeObservation", "remove it and set normalize_obs: running"),
        ("--model.env.wrappers [gymnasium.wrappers.NormalizeReward]", "NormalizeReward", "remove it and set normalize_reward: true"),
        (
            "--model.env.wrappers '[{class_path: ClipReward, init_args: {min_reward: -2, max_reward: 2}}]'",
            "ClipReward",
            "remove it and set clip_reward: 2",
        ),
        ("--model.env.wrappers [no.such.Wrapper]", "env.wrappers", "no.such.Wrapper"),
        ("--model.env.wrappers [GrayscaleObservation]", "env.wrappers: GrayscaleObservation rejects", "3 channels"),
        ("--model.env.wrappers '[{class_path: ClipReward, init_args: {mim_reward: 0}}]'", "ClipReward rejects", "mim_reward"),
        ("--model.env.wrappers '[{clas_path: ClipReward}]'", "env.wrappers takes", "class_path", "clas_path"),
        (
            "--model.env.vectorization native --model.env.id MountainCar-v0",
            "MountainCar-v0",
            "vector entry point",
            "try vectorization sync",
        ),
        ("--model.env.vectorization native --model.env.frame_stack 3", "env.frame_stack", "native", "use sync or async"),
        ("--model.env.vectorization envpool --model.env.id CartPol-v1", "'CartPol-v1' is not an EnvPool task", "did you mean CartPole-v1?"),
        ("--model.env.parameters.lenght 0.5", "env.parameters.lenght is not a parameter of CartPoleEnv", "did you mean length?"),
        ("--model.env.parameters.length short", "env.parameters.length must be a finite number, got 'short'"),
        ("--model.env.parameters 3", "model.env.parameters must be a mapping, got 3"),
        ("--model.env.parameters.length 1 --model.env.vectorization native", "env.parameters does not work with vectorization native"),
        ("--model.env.observe_parameters true", "env.observe_parameters needs env.parameters"),
    ],
    "option: the trainer's own flags": [
        ("--trainer.accelerator nope", "trainer.accelerator 'nope'", "Available names are: auto"),
        ("--trainer.devices 0", "trainer.devices '0'", "--help_all"),
        ("--trainer.devices many", "trainer.devices 'many'", "int > 0"),
        ("--trainer.strategy nope", "trainer.strategy 'nope'", "--help_all"),
        ("--trainer.precision 13", "trainer.precision must be one of 64, 32, 16", "13"),
        ("--trainer.max_time nonsense", "trainer.max_time 'nonsense'", "DD:HH:MM:SS"),
        ("--trainer.max_steps -5", "trainer.max_steps -5", "non-negative integer or -1"),
        ("--trainer.max_epochs 3", "trainer.max_epochs 3", "a run is one epoch; use model.max_env_steps"),
        ("--trainer.fast_dev_run -1", "trainer.fast_dev_run -1", ">= 0"),
        ("--trainer.gradient_clip_val 0.3", "trainer.gradient_clip_val 0.3", "use model.max_grad_norm"),
        ("--trainer.accumulate_grad_batches 2", "trainer.accumulate_grad_batches 2", "batch_size"),
        ("--trainer.torch_threads -1", "trainer.torch_threads must be >= 1 and <= 10000, got -1"),
        ("--trainer.logger NoLogger", "trainer.logger: there is no class NoLogger", "full path"),
        ("--trainer.callbacks NoCallback", "trainer.callbacks: there is no class NoCallback", "full path"),
        ("--trainer.logger CSVLoger", "trainer.logger: there is no class CSVLoger", "did you mean CSVLogger?"),
        ("--trainer.logger CSVLogger", "trainer.logger.save_dir is missing: CSVLogger needs it"),
        ("--trainer.callbacks+=Vide", "trainer.callbacks: there is no class Vide", "did you mean lightning_rl.Video?"),
        ("--trainer.callbacks+=EarlyStoping", "trainer.callbacks: there is no class EarlyStoping", "did you mean EarlyStopping?"),
        (
            "--trainer.callbacks+=lightning_rl.Vide",
            "trainer.callbacks: there is no class lightning_rl.Vide; did you mean lightning_rl.Video?",
        ),
        ("--trainer.logger pytorch_lightning.loggers.CSVLoger", "there is no class", "did you mean pytorch_lightning.loggers.CSVLogger?"),
        ("--trainer.callbacks+=nowhere.Video", "trainer.callbacks: there is no class nowhere.Video", "No module named 'nowhere'"),
        ("--trainer.callbacks+=lightning_rl.PPO", "trainer.callbacks: lightning_rl.PPO is not a Callback"),
        ("--trainer.callbacks.every five", "trainer.callbacks.every belongs to no class; name it before"),
        (
            "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=x --trainer.callbacks.patience=five",
            "trainer.callbacks.patience must be an integer, got five",
        ),
        (
            "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitr=x",
            "trainer.callbacks.monitr is not a setting of EarlyStopping",
        ),
        ("--trainer.default_root_dir garbage.ckpt", "trainer.default_root_dir 'garbage.ckpt'", "Not a directory", "name a folder"),
    ],
    "option: checkpoints": [
        ("--ckpt_path other.ckp", "ckpt_path 'other.ckp' is not a file", "did you mean other.ckpt?"),
        ("--ckpt_path .", "ckpt_path '.' has no checkpoints/last.ckpt; name a run's folder or a checkpoint"),
        ("--ckpt_path garbage.ckpt", "ckpt_path 'garbage.ckpt' cannot be read", "damaged"),
        ("--ckpt_path cut.ckpt", "ckpt_path 'cut.ckpt' cannot be read", "damaged"),
        ("--ckpt_path other.ckpt", "ckpt_path 'other.ckpt' is not a checkpoint of lightning_rl"),
        ("--ckpt_path a2c.ckpt", "ckpt_path 'a2c.ckpt' holds A2C, not PPO", "--model A2C"),
        (
            "--ckpt_path ppo.ckpt --model.net_arch [4]",
            "ckpt_path 'ppo.ckpt' does not fit",
            "[8] in the checkpoint, [4] here",
            "same settings",
        ),
    ],
    "command: any": [
        (
            "foo",
            "there is no subcommand 'foo'",
            "choose from collect, compare, completion, evaluate, export, fit, import-mlagents, import-zoo, list, push,",
        ),
        ("train --model PPO", "there is no subcommand 'train'; did you mean fit?"),
        ("fit PPO CartPole-v1", "'PPO' is not an option; write --model PPO --model.env.id CartPole-v1"),
        ("fit ppo --model.gamma 0.9", "'ppo' is not an option; write --model PPO --model.env.id CartPole-v1"),
        ("fitt --model PPO", "there is no subcommand 'fitt'", "did you mean fit?"),
        (
            "--config ppo/cartpole",
            "a subcommand is missing",
            "fit, tune, evaluate, validate, test, collect, record, compare, export, push, import-mlagents,",
        ),
        ("list ppo", "list takes no options", "'ppo'"),
        ("fit", "model is missing", "--config ppo/cartpole", "--model PPO"),
        ("fit --model PPO", "model.env.id is missing", "--model.env.id CartPole-v1"),
        ("fit --model.env.id CartPole-v1", "model is missing", "--model PPO"),
        ("fit --config ppo/cartpol", "--config ppo/cartpol", "did you mean ppo/cartpole?"),
        ("fit --config nowhere.yaml", "--config nowhere.yaml", "no such file", "lightning-rl list"),
        ("fit --config .", "--config .", "no such file", "lightning-rl list"),
        (FIT + "--import nowhere", "--import nowhere", "No module named 'nowhere'", "current folder"),
        (FIT + "--import wrong", "--import wrong", "SyntaxError"),
        (FIT + "--model mine.PPX", "'mine.PPX'", "did you mean PPO?"),
        (FIT + "--model mine.Mine", "'mine.Mine' is not an algorithm"),
        (FIT + "--model mine.MyPPO --model.fctor 2", "--model.fctor", "did you mean factor?"),
        (MINE + "--model.env.kwargs.spaces text", "observation space Text", "use Box, Discrete"),
        (MINE + "--model.env.kwargs.spaces nothing", "observation space Dict() is empty"),
        (MINE + "--model.env.kwargs.spaces sequence", "observation space Sequence", "use Box, Discrete"),
        (MINE + "--model.env.kwargs.spaces 'text action'", "action space Text", "use Discrete"),
        (MINE + "--model.env.kwargs.spaces 'integer action'", "action space Box(2,)", "Box of floats"),
        (MINE + "--model.env.kwargs.spaces 'unbounded action' --model.action_dist tanh_normal", "tanh_normal", "Box(2,)", "clipped_normal"),
        (
            MINE + "--model SAC --model.env.kwargs.spaces 'unbounded action'",
            "a policy of SAC, TQC, CrossQ or CQL needs a bounded Box, got Box(2,)",
            "use PPO",
        ),
        (MINE + "--model TD3 --model.env.kwargs.spaces 'unbounded action'", "TD3 needs a bounded Box, got Box(2,)", "use PPO"),
        (MINE + "--model DQN --model.env.kwargs.spaces 'integer action'", "DQN and PQN need a Discrete action space, got Box(2,)"),
        (MINE + "--model.env.kwargs.spaces image --model.encoder simple", "encoder simple", "20 x 20, got 8 x 8", "use encoder auto"),
        (MINE + "--model.env.kwargs.spaces broken", "Mine-v0 cannot be built: no display found", "env.kwargs"),
        (MINE + "--model.env.kwargs.spaces broken --model.env.vectorization async", "Mine-v0 cannot be built: no display found"),
        ("evaluate", "required: --ckpt_path"),
        ("evaluate runs/a --episodes 3", "'runs/a' is not an option; write --ckpt_path runs/a"),
        ("record --checkpoint ppo.ckpt", "unrecognized arguments: --checkpoint; did you mean --ckpt_path?"),
        ("evaluate --ckpt_path", "--ckpt_path", "expected one argument"),
        ("evaluate --ckpt_path garbage.ckp", "'garbage.ckp' is not a file", "did you mean garbage.ckpt?"),
        *(
            (f"{command} --ckpt_path .", "ckpt_path '.' has no checkpoints/best.ckpt", "name a run's folder or a checkpoint")
            for command in ("evaluate", "export", "record", "collect --dataset mine/b-v0")
        ),
        *(
            (f"{command} --ckpt_path unregistered.ckpt", "'Mien-v0' is not a registered environment", "or --import its_module")
            for command in ("evaluate", "record", "collect --dataset mine/b-v0")
        ),
        ("export --ckpt_path ppo.ckpt --out nowhere/p.onnx", "there is no folder nowhere; make it first"),
        ("evaluate --ckpt_path garbage.ckpt", "'garbage.ckpt' cannot be read", "damaged"),
        ("evaluate --ckpt_path cut.ckpt", "'cut.ckpt' cannot be read", "damaged"),
        ("evaluate --ckpt_path empty.ckpt", "'empty.ckpt' cannot be read", "damaged"),
        ("evaluate --ckpt_path other.ckpt", "'other.ckpt' is not a checkpoint of lightning_rl"),
        ("evaluate --ckpt_path theirs.ckpt", "'theirs.ckpt' names the module 'theirs'", "--import theirs"),
        ("evaluate --ckpt_path ours.ckpt", "no algorithm 'OurPPO'", "--import its_module"),
        ("evaluate --ckpt_path ppo.ckpt --episodes 0", "episodes must be >= 1, got 0"),
        ("evaluate --ckpt_path ppo.ckpt --episodes many", "--episodes", "invalid int value: 'many'"),
        ("evaluate --ckpt_path ppo.ckpt --seed -1", "seed must be >= 0 and <= 4294967295, got -1"),
        ("evaluate --ckpt_path ppo.ckpt --num_envs 0", "num_envs must be >= 1, got 0"),
        ("evaluate --ckpt_path ppo.ckpt --max_episode_steps 0", "max_episode_steps must be >= 1, got 0"),
        ("evaluate --ckpt_path ppo.ckpt --episode 3", "--episode", "did you mean --episodes?"),
        ("evaluate --ckpt_path ppo.ckpt more", "unrecognized arguments: more", "--episodes"),
    ],
    "config: files": [
        ("", "c.yaml must be a mapping", "got nothing"),
        ("hello", "c.yaml must be a mapping", "'hello'"),
        ("- a\n- b", "c.yaml must be a mapping", "['a', 'b']"),
        (b"\xff\xfe\x00m", "c.yaml is not a text file in UTF-8"),
        ("\tmodel: PPO", "c.yaml is not valid YAML, line 1", r"'\t'"),
        ("model: [PPO", "c.yaml is not valid YAML, line 1", "expected ',' or ']'"),
        (MODEL + "    gamma: 0.9\n    gamma: 0.8\n", "c.yaml is not valid YAML, line 6", "'gamma' appears twice"),
        (MODEL + "? [a, b]\n: 3\n", "c.yaml is not valid YAML, line", "is not a word"),
        ("a: &x [*x]", "c.yaml is not valid YAML, line 1", "recursive"),
        ("model: !!python/object:os.system {}", "c.yaml is not valid YAML, line 1", "python/object"),
        ("a: 1\n---\nb: 2\n", "c.yaml is not valid YAML, line 2", "another document"),
    ],
    "config: keys": [
        (MODEL + "trianer: {}", "trianer in c.yaml", "did you mean trainer?"),
        (MODEL + "trainer: {acelerator: cpu}", "trainer.acelerator in c.yaml", "did you mean accelerator?"),
        (MODEL + "    learning_rat: 1e-3", "model.learning_rat in c.yaml", "did you mean learning_rate?"),
        (MODEL + "    n_steps_: 1", "model.n_steps_ in c.yaml is not a setting of PPO; did you mean n_steps?"),
        (MODEL + "    buffer_size: 1", "model.buffer_size in c.yaml is not a setting of PPO, only of SAC, TQC, CrossQ, DQN, TD3"),
        ("model: {class_path: PPO, gamma: 0.9}", "model.gamma in c.yaml is not a setting; here it is model.init_args.gamma"),
        (
            MODEL + "trainer: {callbacks: [{class_path: X, monitor: y}]}",
            "trainer.callbacks.monitor in c.yaml is not a setting; choose from",
        ),
        (MODEL + "evaluation: {episode: 3}", "evaluation.episode in c.yaml", "did you mean episodes?"),
        (MODEL + "checkpoint: {kep: 3}", "checkpoint.kep in c.yaml", "did you mean keep?"),
        ("model: {class_path: PPO, init_args: {evaluation: {episodes: 3}}}", "model.evaluation in c.yaml", "here it is evaluation"),
        (MODEL + "trainer: {evaluation: {episodes: 3}}", "trainer.evaluation in c.yaml is not a setting; here it is evaluation"),
        (MODEL + "import: [mine]", "import in c.yaml is not a setting; here it is --import MODULE on the command line"),
        ("model: {class_path: PPO, init_arg: {}}", "model.init_arg in c.yaml", "did you mean init_args?"),
        (
            "model: {class_path: PPO, init_args: {env: {id: CartPole-v1, num_env: 3}}}",
            "model.env.num_env in c.yaml",
            "did you mean num_envs?",
        ),
    ],
    "config: shapes and types": [
        ("model: 3", "model in c.yaml must be a mapping", "got 3"),
        ("model: PPX", "'PPX'", "did you mean PPO?"),
        ("model: {class_path: 3}", "model must be the name of an algorithm", "got 3"),
        ("model: {class_path: PPO, init_args: 3}", "model.init_args in c.yaml must be a mapping", "got 3"),
        ("model: {init_args: {env: CartPole-v1}}", "model is missing", "--model PPO"),
        ("model: {class_path: PPO, init_args: {env: {num_envs: 2}}}", "model.env.id is missing", "CartPole-v1"),
        ("model: {class_path: PPO, init_args: {env: null}}", "model.env in c.yaml must be an id such as CartPole-v1", "nothing"),
        ("model: {class_path: PPO, init_args: {env: [CartPole-v1]}}", "model.env in c.yaml must be a mapping", "['CartPole-v1']"),
        ("model: {class_path: PPO, init_args: {env: {id: 3}}}", "model.env.id must be a string", "got 3"),
        (MODEL + "trainer: 3", "trainer in c.yaml must be a mapping", "got 3"),
        (MODEL + "evaluation: 3", "evaluation in c.yaml must be a mapping", "got 3"),
        (MODEL + "checkpoint: [3]", "checkpoint in c.yaml must be a mapping", "[3]"),
        (MODEL + "    n_steps: [1]", "model.n_steps must be an integer", "[1]"),
        (MODEL + "    max_env_steps: null", "max_env_steps must be an integer", "None"),
        (MODEL + "    gamma: .nan", "gamma must be >= 0 and <= 1, got nan"),
        (MODEL + "evaluation: {stop_at: high}", "evaluation.stop_at must be a number", "high"),
        (MODEL + "trainer: {logger: {class_path: NoLogger}}", "trainer.logger: there is no class NoLogger", "full path"),
        (MODEL + "trainer: {callbacks: [{class_path: NoCallback}]}", "trainer.callbacks: there is no class NoCallback", "full path"),
        (MODEL + "trainer: {callbacks: [{class_path: EarlyStopping}]}", "trainer.callbacks.monitor is missing", "EarlyStopping"),
    ],
    "config: schedules": [
        (MODEL + "    learning_rate: {schedule: cosine, start: 1}", "learning_rate.schedule must be one of constant, linear", "'cosine'"),
        (MODEL + "    learning_rate: {start: 1}", "learning_rate.schedule must be one of constant, linear, piecewise", "None"),
        (MODEL + "    learning_rate: {schedule: linear}", "learning_rate.start is missing"),
        (MODEL + "    learning_rate: {schedule: linear, start: 1, ned: 0}", "learning_rate.ned", "did you mean end?"),
        (MODEL + "    learning_rate: {schedule: linear, start: -1}", "learning_rate.start must be >= 0, got -1"),
        (MODEL + "    clip_range: {schedule: piecewise, points: 3}", "clip_range.points must be a list of [progress, value] pairs", "3"),
        (
            MODEL + "    clip_range: {schedule: piecewise, points: [[1, 1], [0, 1]]}",
            "clip_range.points must be in order",
            "[[1, 1], [0, 1]]",
        ),
        (MODEL + "    clip_range: {schedule: piecewise, points: [[2, 1]]}", "clip_range.points progress must be >= 0 and <= 1, got 2"),
        (MODEL + "    clip_range: {schedule: piecewise, points: [[0, -1]]}", "clip_range.points value must be >= 0, got -1"),
    ],
}


RANGES = {
    "PPO": [
        ("n_epochs", 0, ">= 1"),
        ("batch_size", 0, ">= 1"),
        ("gae_lambda", -1, ">= 0 and <= 1"),
        ("sde_sample_freq", -2, ">= -1"),
        ("learning_rate", -1, ">= 0"),
        ("clip_range", -1, ">= 0"),
        ("clip_range_vf", -1, ">= 0"),
        ("ent_coef", -1, ">= 0"),
        ("vf_coef", -1, ">= 0"),
        ("max_grad_norm", 0, "> 0"),
        ("clip_reward", 0, "> 0"),
        ("log_interval", 0, "> 0"),
        ("max_env_steps", 0, ">= 1"),
        ("critic_burn_in_steps", -1, ">= 0"),
        ("normalize_obs_steps", 0, ">= 1"),
        ("encoder_features", 0, ">= 1"),
        ("net_arch", [0], ">= 1"),
    ],
    "A2C": [
        ("rms_prop_eps", 0, "> 0"),
    ],
    "SAC": [
        ("target_entropy_scale", 2, ">= 0 and <= 1"),
        ("batch_size", 0, ">= 1"),
        ("learning_starts", -1, ">= 0"),
        ("train_freq", 0, ">= 1"),
        ("gradient_steps", -2, ">= -1"),
        ("steps_per_iteration", 0, ">= 1"),
        ("n_steps", 0, ">= 1"),
        ("tau", 0, "> 0 and <= 1"),
        ("target_update_interval", 0, ">= 1"),
        ("n_critics", 0, ">= 1"),
        ("log_std_init", 21, ">= -20 and <= 20"),
        ("ent_coef", -1, ">= 0"),
    ],
    "DQN": [
        ("exploration_fraction", 2, ">= 0 and <= 1"),
        ("exploration_initial_eps", -1, ">= 0 and <= 1"),
        ("exploration_final_eps", 1.5, ">= 0 and <= 1"),
        ("adam_eps", 0, "> 0"),
    ],
    "TD3": [
        ("policy_delay", 0, ">= 1"),
        ("action_noise", -1, ">= 0"),
        ("target_policy_noise", -1, ">= 0"),
        ("target_noise_clip", -1, ">= 0"),
    ],
}
"""Settings of algorithms with a value out of their range, and what they must be; checked without a run."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Good and bad checkpoints, and modules with and without a mistake."""
    from lightning_rl import A2C, PPO

    folder = tmp_path_factory.mktemp("checkpoints")
    fit_plain(tiny(PPO, n_steps=4, batch_size=8, max_env_steps=8)).save_checkpoint(folder / "ppo.ckpt")
    fit_plain(tiny(A2C, n_steps=4, max_env_steps=8)).save_checkpoint(folder / "a2c.ckpt")
    good = torch.load(folder / "ppo.ckpt", weights_only=True)
    torch.save({**good, "lightning_rl": good["lightning_rl"] | {"algorithm": "OurPPO"}}, folder / "ours.ckpt")
    env = good["hyper_parameters"]["env"] | {"id": "theirs:Env-v0"}
    torch.save({**good, "hyper_parameters": {**good["hyper_parameters"], "env": env}}, folder / "theirs.ckpt")
    torch.save({**good, "hyper_parameters": {**good["hyper_parameters"], "env": env | {"id": "Mien-v0"}}}, folder / "unregistered.ckpt")
    torch.save({"state_dict": {}, "optimizer": {}}, folder / "other.ckpt")
    whole = (folder / "ppo.ckpt").read_bytes()
    (folder / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    (folder / "garbage.ckpt").write_bytes(b"garbage")
    (folder / "empty.ckpt").write_bytes(b"")
    (folder / "mine.py").write_text(MODULE)
    (folder / "wrong.py").write_text("def (")
    yield folder
    sys.modules.pop("mine", None)  # from here and not from the folder of another test


def is_one_line(status, out, err, words):
    line = err.removesuffix("\n")
    return status == 2 and line.startswith("error: ") and "\n" not in line and len(line) <= 200 and all(word in line for word in words)


@pytest.mark.variants("no such option", "keys", "files", "option: types")
@pytest.mark.parametrize("kind", ERRORS)
def test_wrong_input_ends_in_one_line(kind, folder, checkpoints, monkeypatch, capfd):
    monkeypatch.chdir(checkpoints)
    failed = []
    for text, *words in ERRORS[kind]:
        command = text if kind.startswith("command") else FIT + str(text)
        if kind.startswith("config"):
            Path("c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
            command = "fit --config c.yaml"
        result = run(command, capfd)
        if not is_one_line(*result, words):
            failed.append((text, words, result))
    assert failed == []


@pytest.mark.parametrize("name", RANGES)
def test_numbers_out_of_range_are_refused_by_the_algorithm(name):
    for setting, value, words in RANGES[name]:
        with pytest.raises(SettingError, match=f"^{setting} must be {re.escape(words)}, got "):
            getattr(lightning_rl, name)("Pendulum-v1" if name == "TD3" else "CartPole-v1", **{setting: value})


APART = [
    ("fit --model PPO --model.env.id CartPol-v1", "'CartPol-v1'", "did you mean CartPole-v1?"),
    (MINE + "--model.env.vectorization async --model.env.kwargs.spaces broken", "no display"),
    (FIT + "--trainer.callbacks+=Videos", "there is no class Videos", "did you mean lightning_rl.Video?"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("row", APART, ids=[row[0] for row in APART])
def test_a_process_ends_with_one_line_and_status_2(row, checkpoints):
    assert is_one_line(*run_apart(row[0], checkpoints), row[1:])


@pytest.mark.thorough
def test_nothing_is_left_behind_by_a_wrong_setting(folder, capfd):
    run(FIT + "--model.n_steps 0", capfd)
    run(FIT + TINY + "--model.batch_size 5", capfd)
    assert list(folder.iterdir()) == []


def test_debug_shows_the_traceback(folder):
    with pytest.raises(SettingError, match="n_steps must be >= 1"):
        main([*FIT.split(), "--model.n_steps", "0", "--debug"])


@pytest.mark.thorough
def test_an_error_in_a_loss_of_a_users_own_is_shown_without_the_calls_of_lightning(folder, capfd):
    lines = ("from lightning_rl import PPO", "class Broken(PPO):", "    def loss(self, *given):", "        return [][1]")
    (folder / "broken.py").write_text("\n".join(lines))
    broken = "fit --import broken --model broken.Broken --model.env.id CartPole-v1 " + TINY.removeprefix("--model PPO ")
    status, _, err = run(broken, capfd)
    assert status == 1 and "return [][1]" in err and "IndexError: list index out of range" in err
    assert "pytorch_lightning" not in err and err.endswith("(--debug shows all calls)\n")
    with pytest.raises(IndexError):
        main([*shlex.split(broken), "--debug"])


OWN = """
from dataclasses import dataclass
from typing import Annotated

import pytorch_lightning as pl
import torch

from lightning_rl import PPO, Range


class Mistaken(PPO):
    def __post_init__(self):
        super().__post_init__()
        torch.nn.Linear(3)


class Refusing(PPO):
    def __post_init__(self):
        super().__post_init__()
        raise ValueError("gamma is too odd")


class Undecorated(PPO):
    atoms: Annotated[int, Range(1)] = 25


class WithInit(PPO):
    def __init__(self, env, *, atoms: Annotated[int, Range(1)] = 25, **common):
        super().__init__(env, **common)


class Picky(pl.Callback):
    def __init__(self, n: int = 1):
        if n < 2:
            raise ValueError("n must be at least 2")
        if n == 2:
            try:
                {}["x"]
            except KeyError as error:
                raise ValueError("two is refused") from error
        self.missing.start()
"""


@pytest.fixture
def own(folder):
    """A module of a user's own in the current folder, and how to train with one of its classes."""
    (folder / "own.py").write_text(OWN)
    return "fit --import own --model own.{} --model.env.id CartPole-v1 --model.max_env_steps 512 ".format


def test_a_mistake_where_an_own_algorithm_is_built_is_shown_with_its_line(own, capfd):
    status, _, err = run(own("Mistaken"), capfd)
    assert status == 1 and "torch.nn.Linear(3)" in err and "own.py" in err and "TypeError: Linear.__init__() missing 1" in err
    assert not any(name in err for name in ("pytorch_lightning", "jsonargparse", "contextlib", "Union subtypes"))


def test_a_mistake_in_an_own_callback_is_shown_with_its_line(own, folder, capfd):
    status, _, err = run(FIT + "--trainer.callbacks+=own.Picky --trainer.callbacks.n 3", capfd)
    assert status == 1 and "self.missing.start()" in err and "'Picky' object has no attribute 'missing'" in err


@pytest.mark.thorough
def test_what_own_code_refuses_is_one_line_with_its_place(own, capfd):
    assert run(own("Refusing"), capfd)[2].endswith("error: model.gamma is too odd (own.py:20)\n")
    assert run(FIT + "--trainer.callbacks+=own.Picky", capfd)[2].endswith("error: n must be at least 2 (own.py:35)\n")
    again = run(FIT + "--trainer.callbacks+=own.Picky --trainer.callbacks.n 2", capfd)[2]
    assert again.endswith("error: two is refused (own.py:40)\n")


def test_a_user_module_that_cannot_be_imported_is_reported_with_the_line(folder, capfd):
    (folder / "broken.py").write_text("x = 1\ny = nope\n")
    told = "NameError: name 'nope' is not defined (broken.py:2)"
    assert run("fit --import broken --model PPO --model.env.id CartPole-v1", capfd)[2] == f"error: --import broken: {told}\n"
    assert told in run("fit --model broken.Mine --model.env.id CartPole-v1", capfd)[2]


def test_a_setting_of_an_own_class_that_is_no_dataclass_is_refused_with_the_decorator(own, capfd):
    told = "Undecorated.atoms: atoms is a setting; decorate the class with @dataclass(kw_only=True, eq=False, repr=False)"
    assert run(own("Undecorated") + "--model.atoms 3", capfd)[2] == f"error: {told}\n"


@pytest.mark.thorough
def test_the_range_of_a_setting_of_an_own_init_is_checked(own, capfd):
    assert run(own("WithInit") + "--model.atoms 0", capfd)[2].endswith("error: model.atoms must be >= 1, got 0\n")


def test_an_unknown_class_of_a_user_module_is_reported_with_its_algorithms(own, capfd):
    names = "PPO, Mistaken, Refusing, Undecorated, WithInit"
    told = run(own("X"), capfd)[2]
    assert told == f"error: model 'own.X': there is no X in own; choose from {', '.join(sorted(names.split(', ')))}\n"


def test_a_zoo_file_given_to_fit_is_reported_with_the_command_that_converts_it(folder, capfd):
    (folder / "ppo.yml").write_text("CartPole-v1: {n_envs: 8, n_timesteps: 1e5, policy: MlpPolicy}")
    status, _, err = run("fit --config ppo.yml", capfd)
    told = "is of rl-baselines3-zoo; convert it: lightning-rl import-zoo ppo.yml CartPole-v1 > mine.yaml"
    assert (status, err) == (2, f"error: CartPole-v1 in ppo.yml {told}\n")
    status, out, _ = run("import-zoo ppo.yml CartPole-v1", capfd)
    assert status == 0 and "max_env_steps: 100000" in out


def test_a_message_about_a_bare_value_gets_the_flag_in_front():
    given = {"accelerator": "gpu", "strategy": "auto", "devices": "auto", "default_root_dir": "runs"}
    text = explain_flag("No supported gpu backend found!", given)
    assert text.startswith("trainer.accelerator 'gpu': No supported gpu backend found!")
    assert explain_flag("strategy='ddx' is invalid; choices: auto, ddp", {**given, "strategy": "ddx"}).startswith("trainer.strategy 'ddx'")


TINY_FIT = f"fit --model.env.id CartPole-v1 {TINY}"


def written_to(stdout, arguments, folder):
    """Return exit status and stderr of the program whose output goes to a descriptor."""
    program = Apart(f"-m lightning_rl {arguments}", folder, stdout=stdout)
    return program.wait(), program.communicate()[1]


@pytest.mark.thorough
def test_a_shell_sees_the_status_of_a_broken_pipe(folder):
    command = f"set -o pipefail; {shlex.quote(sys.executable)} -m lightning_rl list | true"
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", ["list", "fit --help", TINY_FIT, "compare a --out report.html"])
def test_a_reader_that_goes_away_ends_the_program_quietly(arguments, folder):
    write_run(folder / "a", {100: [1]})
    reader, writer = os.pipe()
    os.close(reader)
    assert written_to(writer, arguments, folder) == (141, "")
    assert (folder / "report.html").is_file() == ("--out" in arguments)


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize("arguments", ["list", TINY_FIT])
def test_output_that_cannot_be_written_is_one_line(arguments, folder):
    assert written_to(os.open("/dev/full", os.O_WRONLY), arguments, folder) == (
        2,
        "error: the output could not be written: No space left on device\n",
    )


def test_an_error_of_the_system_that_is_not_the_outputs_is_shown(monkeypatch, capsys):
    def broken(*_):
        raise BrokenPipeError(32, "a worker is gone")

    monkeypatch.setattr("lightning_rl.cli.main.run", broken)
    assert main(["list"]) == 1 and "BrokenPipeError: [Errno 32] a worker is gone" in capsys.readouterr().err
    with pytest.raises(BrokenPipeError, match="a worker is gone"):
        main(["list", "--debug"])
