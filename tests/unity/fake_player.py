"""A stand-in for a Unity player: a client that plays a small scene by ML-Agents' protocol, started as an executable. No Unity needed.

python fake_player.py --mlagents-port 5005 [--scene mixed] [--crash-at TICK] [--hang-at TICK] [--quit-at TICK]
"""

import argparse
import io
import itertools
import json
import math
import os
import random
import signal
import struct
import sys
import time

import grpc
from PIL import Image

from lightning_rl.envs.unity import channels, wire

M = wire.messages()
SAMPLERS = "uniform", "gaussian", "multirange"


class Channels:
    """Unity's side of the side channels."""

    def __init__(self):
        self.parameters, self.engine, self.out = {}, {}, b""

    def read(self, data):
        for channel, payload in channels.read_messages(data):
            if channel == channels.PARAMETERS:
                self.read_parameter(payload)
            elif channel == channels.ENGINE:
                (kind,) = struct.unpack_from("<i", payload)
                self.engine[kind] = struct.unpack_from({0: "<ii", 2: "<f"}.get(kind, "<i"), payload, 4)

    def read_parameter(self, payload):
        (size,) = struct.unpack_from("<i", payload)
        key, place = payload[4 : 4 + size].decode("ascii"), 4 + size
        (kind,) = struct.unpack_from("<i", payload, place)
        if kind == 0:
            self.parameters[key] = struct.unpack_from("<f", payload, place + 4)[0]
            return
        seed, sampler = struct.unpack_from("<ii", payload, place + 4)
        numbers = struct.unpack_from("<ff", payload, place + 12)
        if sampler == 2:
            (count,) = struct.unpack_from("<i", payload, place + 12)
            numbers = struct.unpack_from(f"<{count}f", payload, place + 16)
        self.parameters[key] = SAMPLERS[sampler], seed, numbers

    def add_stat(self, key, value, kind=0):
        self.out += channels.make_message(channels.STATS, channels.make_text(key) + struct.pack("<fi", value, kind))


class Academy:
    """Talks to the trainer: agents are `put` in, and `decide` sends them and returns the actions by agent id."""

    def __init__(self, port, wait, version):
        self.channels, self.specs, self.sent, self.order, self.message = Channels(), {}, set(), {}, M.UnityMessageProto()
        self.quit = self.reset = False
        self.actions = []
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        self.channel = grpc.insecure_channel(f"localhost:{port}", unlimited)
        grpc.channel_ready_future(self.channel).result(wait)
        self.call = self.channel.unary_unary(wire.METHOD, M.UnityMessageProto.SerializeToString, M.UnityMessageProto.FromString)
        hello = {"name": "AcademySingleton", "package_version": "3.0.0", "communication_version": version}
        hello["capabilities"] = {name: True for *_, name in wire.fields_of("UnityRLCapabilitiesProto")}
        self.init = self.exchange(M.UnityMessageProto(unity_output={"rl_initialization_output": hello})).rl_initialization_input
        self.take(self.exchange().rl_input)

    def exchange(self, message=None, status=wire.OK):
        message = message or M.UnityMessageProto()
        message.header.status = status
        try:
            reply = self.call(message)
        except grpc.RpcError:
            self.quit = True
            return M.UnityInputProto()
        self.quit |= reply.header.status != wire.OK
        return reply.unity_input

    def take(self, content):
        self.channels.read(content.side_channel)
        self.reset |= content.command == wire.RESET

    def put(self, behavior, agent_id, observations, reward=0.0, done=False, interrupted=False, mask=(), group=0, group_reward=0.0):
        kept = {"action_mask": mask, "group_id": group, "group_reward": group_reward}
        info = self.agents(behavior).add(reward=reward, done=done, max_step_reached=interrupted, id=agent_id, **kept)
        info.observations.extend(observations)
        if not done:
            self.order.setdefault(behavior, []).append(agent_id)

    def agents(self, behavior):
        """Return the agents of a behavior in the next message."""
        return self.message.unity_output.rl_output.agent_infos[behavior].value

    @property
    def has_agents(self):
        """Return whether there are agents in the next message."""
        return any(agents.value for agents in self.message.unity_output.rl_output.agent_infos.values())

    def decide(self):
        message, self.message = self.message, M.UnityMessageProto()
        output = message.unity_output
        for behavior, (continuous, branches) in self.specs.items():
            if output.rl_output.agent_infos[behavior].value and behavior not in self.sent:
                spec = {"num_continuous_actions": continuous, "num_discrete_actions": len(branches), "discrete_branch_sizes": branches}
                output.rl_initialization_output.brain_parameters.add(brain_name=behavior, is_training=True, action_spec=spec)
                self.sent.add(behavior)
        output.rl_output.side_channel, self.channels.out = self.channels.out, b""
        content = self.exchange(message).rl_input
        asked, self.order = self.order, {}
        self.take(content)
        if self.quit or self.reset:
            return {}
        actions = {}
        for behavior, sent in content.agent_actions.items():
            for agent_id, action in zip(asked.get(behavior, []), sent.value, strict=True):
                actions[agent_id] = list(action.continuous_actions), list(action.discrete_actions)
        self.actions.append(sorted(actions.items()))
        return actions


def vector(values, name, goal=False):
    floats = {"data": values}
    return M.ObservationProto(shape=[len(values)], float_data=floats, dimension_properties=[1], observation_type=int(goal), name=name)


def entities(rows, size, limit):
    flat = [value for row in rows for value in row] + [0.0] * size * (limit - len(rows))
    return M.ObservationProto(shape=[limit, size], float_data={"data": flat}, dimension_properties=[4, 1], name="near")


def image(planes, height, width, name, mapping=(), last=False):
    """Return an observation of PNGs with three planes each, as Unity's; `last`: of shape [H, W, C], as before package 3.0."""
    data = b""
    for first in range(0, len(planes), 3):
        three = (planes[first : first + 3] + [bytes(height * width)] * 3)[:3]
        file = io.BytesIO()
        Image.merge("RGB", [Image.frombytes("L", (width, height), plane) for plane in three]).save(file, "PNG")
        data += file.getvalue()
    channels_ = max(mapping) + 1 if mapping else len(planes)
    shape = [height, width, channels_] if last else [channels_, height, width]
    properties = [2, 2, 1] if last else [1, 2, 2]
    compressed = {"compression_type": wire.PNG, "compressed_data": data, "channel_mapping": mapping}
    return M.ObservationProto(shape=shape, dimension_properties=properties, name=name, **compressed)


class Body:
    """An agent in a scene. It keeps its id from episode to episode, until it is disabled: `there` is false."""

    def __init__(self, behavior, group=0):
        self.behavior, self.group, self.there, self.id = behavior, group, False, -1
        self.begin()

    def begin(self):
        self.reward = self.group_reward = 0.0
        self.age = 0


class Mixed:
    """Walkers that act at every tick and end or are cut; two teams with images, a list of entities, masks and mixed actions, in groups
    whose members die early and come back later; decisions every second tick, and ticks in which nobody decides but some end."""

    def __init__(self, academy, args):
        self.academy, self.random, self.ids, self.tick = academy, random.Random(academy.init.seed), itertools.count(), 0
        academy.specs.update({"Walker?team=0": (2, ()), "Fighter?team=0": (1, (3, 2)), "Fighter?team=1": (1, (3, 2))})
        self.bodies = [Body("Walker?team=0") for _ in range(args.count or 4)]
        self.bodies += [Body(f"Fighter?team={team}", group=team + 1) for team in (0, 1) for _ in range(2)]

    def begin(self):
        for body in self.bodies:
            body.begin()
            if not body.there:
                self.enter(body)

    def enter(self, body):
        """Enable an agent: only this gives it a new id."""
        body.id, body.there = next(self.ids), True
        body.begin()

    def observe(self, body):
        draw = self.random
        if body.behavior.startswith("Walker"):
            return [vector([draw.uniform(-1, 1) for _ in range(8)], "walk"), vector([0.0, 1.0, float(body.age % 2)], "goal", True)]
        six = [bytes(draw.randrange(256) for _ in range(20 * 21)) for _ in range(6)]
        gray = [bytes(draw.randrange(256) for _ in range(20 * 22))] * 3
        near = [[draw.random() for _ in range(4)] for _ in range(draw.randrange(4))]
        camera = image(six, 20, 21, "camera", mapping=[0, 1, 2, 3, 4, -1])
        own = vector([draw.gauss(0, 1) for _ in range(5)], "own")
        return [camera, image(gray, 20, 22, "gray", mapping=[0, 0, 0]), entities(near, 4, 6), own]

    def put(self, body, done=False, interrupted=False, mask=()):
        group = body.group, body.group_reward
        self.academy.put(body.behavior, body.id, self.observe(body), body.reward, done, interrupted, mask, *group)

    def step(self):
        self.tick += 1
        draw = self.random
        for body in self.bodies:
            walker = body.behavior.startswith("Walker")
            if not body.there and draw.random() < 0.1:
                self.enter(body)  # a member of a group comes into the running episode of the others
            if not body.there:
                continue
            if body.age and draw.random() < 0.08:
                body.reward += 1.0
                for other in self.bodies:
                    other.group_reward += 0.5 * (not walker and other.group == body.group)
                self.put(body, done=True)
                body.begin()
                body.there = walker
                if not walker:
                    continue
            elif walker and body.age == 12:
                self.put(body, done=True, interrupted=True)
                body.begin()
            if self.tick % 5 and (walker or (self.tick + body.group) % 2 == 0):
                self.put(body, mask=() if walker else [False, *(draw.random() < 0.3 for _ in range(3)), False])
                body.reward = body.group_reward = 0.0
            body.age += 1
        self.academy.channels.add_stat("scene/tick", self.tick, 1)
        return self.academy.has_agents

    def apply(self, actions):
        for body in self.bodies:
            if body.there and body.id in actions:
                continuous, discrete = actions[body.id]
                body.reward += 0.25 * continuous[0] + 0.125 * sum(discrete)


class Reach:
    """Agents in the plane see (place, target) and move by their action; the reward is the distance gained, and 1 on arrival.

    `--kind`: discrete has five moves, of which a step off the field is forbidden; hybrid chooses an axis and a length; visual shows a
    picture, `[H, W, C]` with hwc; goals tells the target as a goal, and as one of a list; team is played by agents of two teams, pair by
    those of two behaviors.
    """

    moves = (0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)

    def __init__(self, academy, args):
        self.academy, self.random, self.kind = academy, random.Random(academy.init.seed), args.kind
        spec = {"discrete": (0, (5,)), "hybrid": (1, (2, 2))}.get(args.kind, (2, ()))
        names = {"team": ["Reach?team=0", "Reach?team=1"], "pair": ["Reach?team=0", "Chase?team=0"]}.get(args.kind, ["Reach?team=0"])
        academy.specs |= dict.fromkeys(names, spec)
        self.bodies = [Body(names[number % len(names)]) for number in range(args.count or 16)]
        for number, body in enumerate(self.bodies):
            body.id = number

    def begin(self):
        for body in self.bodies:
            self.start(body)

    def start(self, body):
        draw, scale = self.random.uniform, self.academy.channels.parameters.get("distance", 1.0)
        body.begin()
        body.place, body.target = [draw(-1, 1), draw(-1, 1)], [draw(-scale, scale), draw(-scale, scale)]

    def see(self, body):
        if self.kind in ("visual", "hwc"):
            planes = [bytearray(20 * 20) for _ in range(3)]
            for plane, (x, y) in zip(planes, (body.place, body.target), strict=False):
                plane[int((x + 1.5) * 6.3) * 20 + int((y + 1.5) * 6.3)] = 255
            return [image(list(map(bytes, planes)), 20, 20, "camera", last=self.kind == "hwc")]
        if self.kind == "goals":
            listed = [[*body.target, 1.0], [0.3, -0.3, -1.0]]
            return [vector(body.place, "place"), vector(body.target, "target", True), entities(listed, 3, 4)]
        return [vector([*body.place, *body.target], "state")]

    def mask(self, body):
        if self.kind != "discrete":
            return ()
        return [max(abs(place + 0.1 * step) for place, step in zip(body.place, move, strict=True)) > 1.5 for move in self.moves]

    def step(self):
        for body in self.bodies:
            if body.age and (math.dist(body.place, body.target) < 0.1 or body.age == 50):
                self.academy.put(body.behavior, body.id, self.see(body), body.reward, True, body.age == 50)
                self.academy.channels.add_stat("arrives", float(body.age != 50))
                self.start(body)
            self.academy.put(body.behavior, body.id, self.see(body), body.reward, mask=self.mask(body))
            body.reward = 0.0
            body.age += 1
        return True

    def apply(self, actions):
        for body in self.bodies:
            if body.id not in actions:
                continue
            before, (move, choices) = math.dist(body.place, body.target), actions[body.id]
            if self.kind == "discrete":
                if self.mask(body)[choices[0]]:
                    raise ValueError("a forbidden action was chosen")
                move = self.moves[choices[0]]
            elif self.kind == "hybrid":
                length = move[0] * (1 - 2 * choices[1])
                move = (length, 0) if choices[0] else (0, length)
            pairs = zip(body.place, move, strict=True)
            body.place = [max(-1.49, min(1.49, place + 0.1 * max(-1.0, min(1.0, step)))) for place, step in pairs]
            after = math.dist(body.place, body.target)
            body.reward += before - after - 0.01 + (after < 0.1)


class Plane:
    """Scenes whose agents see (place, target) in the plane, and move by their actions."""

    def put(self, body, done=False, interrupted=False):
        seen = [vector([*body.place, *body.target], "state")]
        self.academy.put(body.behavior, body.id, seen, body.reward, done, interrupted, (), body.group, body.group_reward)

    def move(self, bodies, actions):
        for body in bodies:
            if body.id in actions:
                moves = (max(-1.0, min(1.0, step)) for step in actions[body.id][0])
                body.place = [max(-1.5, min(1.5, place + 0.1 * step)) for place, step in zip(body.place, moves, strict=True)]


class Coop(Plane):
    """Groups of three. One that reaches its group's target is disabled; all come back when the last has, or after 40 ticks."""

    name = "Coop?team=0"

    def __init__(self, academy, args):
        self.academy, self.random, self.ids = academy, random.Random(academy.init.seed), itertools.count()
        academy.specs[self.name] = (2, ())
        self.groups = [[Body(self.name, group=number + 1) for _ in range(3)] for number in range(args.count or 8)]

    def begin(self):
        for group in self.groups:
            self.start(group)

    def start(self, group):
        draw = self.random.uniform
        target = [draw(-1, 1), draw(-1, 1)]
        for body in group:
            if not body.there:
                body.id, body.there = next(self.ids), True
            body.begin()
            body.place, body.target = [draw(-1, 1), draw(-1, 1)], target

    def step(self):
        for group in self.groups:
            there = [body for body in group if body.there]
            if there[0].age:
                arrived = [body for body in there if math.dist(body.place, body.target) < 0.3]
                for body in there:
                    body.group_reward += 0.5 * len(arrived) - 0.02
                late = there[0].age == 40
                for body in there if late else arrived:
                    self.put(body, True, late and body not in arrived)
                    body.there = body not in arrived
                if late or not any(body.there for body in group):
                    self.start(group)
            for body in group:
                if body.there:
                    self.put(body)
                    body.group_reward = 0.0
                    body.age += 1
        return True

    def apply(self, actions):
        self.move((body for group in self.groups for body in group if body.there), actions)


class Race(Plane):
    """Games of two teams: the one of which somebody reaches the target first wins, and after 40 ticks nobody does.

    `--kind groups`: teams of two, which are groups that win and lose together.
    """

    names = "Race?team=0", "Race?team=1"

    def __init__(self, academy, args):
        self.academy, self.random = academy, random.Random(academy.init.seed)
        self.shared, ids, groups = args.kind == "groups", itertools.count(), itertools.count(1)
        academy.specs |= dict.fromkeys(self.names, (2, ()))
        self.games = []
        for _ in range(args.count or 8):
            teams = [[Body(name, group) for _ in range(1 + self.shared)] for name in self.names for group in [next(groups) * self.shared]]
            for body in (each for team in teams for each in team):
                body.id = next(ids)
            self.games.append(teams)

    def begin(self):
        for teams in self.games:
            self.start(teams)

    def start(self, teams):
        draw = self.random.uniform
        target = [draw(-1, 1), draw(-1, 1)]
        for body in (each for team in teams for each in team):
            body.begin()
            body.place, body.target = [draw(-1, 1), draw(-1, 1)], target

    def step(self):
        for teams in self.games:
            if teams[0][0].age:
                arrived = [any(math.dist(body.place, body.target) < 0.2 for body in team) for team in teams]
                late = teams[0][0].age == 40
                for team, own, others in zip(teams, arrived, reversed(arrived), strict=True):
                    for body in team if late or any(arrived) else ():
                        name = "group_reward" if self.shared else "reward"
                        setattr(body, name, float(own) - float(others))
                        self.put(body, True, late and not any(arrived))
                if late or any(arrived):
                    self.start(teams)
            for body in (each for team in teams for each in team):
                self.put(body)
                body.age += 1
        return True

    def apply(self, actions):
        self.move((body for teams in self.games for team in teams for body in team), actions)


class Ball:
    """Sends the same message again and again: what remains is the exchange itself. `--size`: of a picture; `--repeat`: without reading
    what is sent, for measurements."""

    def __init__(self, academy, args):
        self.academy = academy
        academy.specs["Ball?team=0"] = (2, ())
        noise, size = random.Random(0), args.size
        seen = [vector([noise.uniform(-1, 1) for _ in range(45)], "state")]
        if size:
            seen.append(image([bytes(noise.randrange(256) for _ in range(size * size)) for _ in range(3)], size, size, "camera"))
        self.infos = [M.AgentInfoProto(id=i + 1, reward=0.1, observations=seen) for i in range(args.count or 16)]
        self.repeats = args.repeat

    def begin(self):
        pass

    def step(self):
        if self.repeats and self.academy.sent:
            self.repeat()
            return False
        self.academy.agents("Ball?team=0").extend(self.infos)
        self.academy.order["Ball?team=0"] = [info.id for info in self.infos]
        return True

    def repeat(self):
        output = M.UnityOutputProto()
        output.rl_output.agent_infos["Ball?team=0"].value.extend(self.infos)
        data = M.UnityMessageProto(header={"status": wire.OK}, unity_output=output).SerializeToString()
        going_on = M.UnityMessageProto(header={"status": wire.OK}).SerializeToString()
        call = self.academy.channel.unary_unary(wire.METHOD)
        self.academy.quit = True
        try:
            while call(data).startswith(going_on):
                pass
        except grpc.RpcError:
            pass

    def apply(self, actions):
        pass


class Listed:
    """Sends the messages of `--script`, a list in JSON: each a mapping of behaviors to agents `[id, observation, keywords of put]`.

    Among the keywords may be `stats`, which the scene then reports.
    """

    def __init__(self, academy, args):
        self.academy, self.messages = academy, json.loads(args.script)
        academy.specs |= {behavior: (1, ()) for message in self.messages for behavior in message}
        self.left = iter(self.messages)

    def begin(self):
        self.left = iter(self.messages)

    def step(self):
        for behavior, agents in next(self.left, self.messages[-1]).items():
            for agent_id, seen, given in agents:
                more = {name: value for name, value in given.items() if name != "stats"}
                for stat in given.get("stats", ()):
                    self.academy.channels.add_stat(*stat)
                self.academy.put(behavior, agent_id, [vector(seen, "seen")], **more)
        return True

    def apply(self, actions):
        pass


SCENES = {"mixed": Mixed, "reach": Reach, "coop": Coop, "race": Race, "ball": Ball, "listed": Listed}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlagents-port", type=int, required=True)
    parser.add_argument("--scene", default="mixed", choices=SCENES)
    parser.add_argument("--kind", default="")
    parser.add_argument("--script")
    parser.add_argument("--count", type=int)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--repeat", action="store_true")
    parser.add_argument("--wait", type=float, default=30.0)
    parser.add_argument("--version", default=wire.VERSION)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds of simulation in each tick")
    parser.add_argument("--log", help="a file for what the trainer sent; a line for each player")
    parser.add_argument("-logFile", default=os.devnull)
    parser.add_argument("--stubborn", action="store_true", help="do not quit when asked")
    for name in ("crash", "hang", "quit"):
        parser.add_argument(f"--{name}-at", type=int)
    args, _ = parser.parse_known_args()
    academy = Academy(args.mlagents_port, args.wait, args.version)
    with open(args.logFile, "a") as file:
        file.write(f"seed {academy.init.seed}\n")
    scene, tick = SCENES[args.scene](academy, args), 0
    while not academy.quit:
        tick += 1
        if academy.reset:
            academy.reset = False
            scene.begin()
        if tick == args.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if tick == args.hang_at:
            time.sleep(3600)
        if tick == args.quit_at:
            academy.exchange(None, wire.CLOSED)
            break
        if args.sleep:
            time.sleep(args.sleep)
        if scene.step():
            scene.apply(academy.decide())
    if args.log:
        sent = {"parameters": academy.channels.parameters, "engine": academy.channels.engine, "seed": academy.init.seed}
        with open(args.log, "a") as file:
            file.write(json.dumps({**sent, "areas": academy.init.num_areas, "actions": academy.actions}) + "\n")
    if args.stubborn:
        time.sleep(3600)
    academy.channel.close()


if __name__ == "__main__":
    sys.exit(main())
