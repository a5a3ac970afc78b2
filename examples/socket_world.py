"""PPO in a world that lives in another process and speaks JSON over a socket, as simulators do.

python examples/socket_world.py        # starts the world and trains; stop it at any time: the same line resumes it
"""

import json
import os
import random
import socketserver
import subprocess
import sys
import threading
from socket import create_connection

import gymnasium as gym
import numpy as np


class World(socketserver.StreamRequestHandler):
    """A boat that drifts in the wind, for one client: it pays to stay near the middle of the lake."""

    def handle(self):
        self.position, self.left, self.wind = 0.0, 0, random.Random(0)
        for line in self.rfile:
            call, *arguments = json.loads(line)
            self.wfile.write(json.dumps(getattr(self, call)(*arguments)).encode() + b"\n")

    def reset(self, seed):
        if seed is not None:
            self.wind.seed(seed)
        self.position, self.left = self.wind.uniform(-2, 2), 50
        return self.position

    def step(self, action):
        self.position += 0.2 * (action - 1) + self.wind.gauss(0.1, 0.1)
        self.left -= 1
        return self.position, 1.0 - abs(self.position), abs(self.position) > 3, self.left == 0

    def get_state(self):
        return [self.position, self.left, self.wind.getstate()]

    def set_state(self, position, left, wind):
        self.position, self.left = position, left
        self.wind.setstate((wind[0], tuple(wind[1]), wind[2]))


class SocketWorld(gym.Env):
    """The client of a world: its methods call the server at the port WORLD_PORT."""

    observation_space, action_space = gym.spaces.Box(-4, 4, (1,), np.float32), gym.spaces.Discrete(3)

    def __init__(self):
        self.connection = create_connection(("127.0.0.1", int(os.environ["WORLD_PORT"])))
        self.stream = self.connection.makefile("rw")

    def call(self, *message):
        self.stream.write(json.dumps(message) + "\n")
        self.stream.flush()
        return json.loads(self.stream.readline())

    def reset(self, *, seed=None, options=None):
        return np.array([self.call("reset", seed)], np.float32), {}

    def step(self, action):
        position, reward, terminated, truncated = self.call("step", int(action))
        return np.array([position], np.float32), reward, terminated, truncated, {}

    def get_state(self):  # with these two a run resumes in the middle of an episode; without them new episodes start
        return self.call("get_state")

    def set_state(self, state):
        self.call("set_state", *state)

    def close(self):
        self.stream.close()
        self.connection.close()


def serve():
    """Serve a world to each connection, until the program that started this one has ended."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), World) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()


def train():
    import pytorch_lightning as pl  # here, since the server needs neither

    import lightning_rl as lrl

    pl.seed_everything(1)
    model = lrl.PPO(lrl.EnvConfig(SocketWorld, num_envs=4), n_steps=64, batch_size=64, learning_rate=1e-3, max_env_steps=10_000)
    lrl.Trainer(checkpoint={"every_n_env_steps": 1_000}).fit(model, ckpt_path="last")


if __name__ == "__main__":
    if "serve" in sys.argv:
        serve()
    else:
        server = subprocess.Popen([sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        os.environ["WORLD_PORT"] = server.stdout.readline()
        train()
