"""TextArena games: `textarena:GuessTheNumber-v0`, `textarena:TicTacToe-v0`.

Only what is new is shown in each turn: the library's own wrappers, which repeat the whole history,
are taken off.
"""

from __future__ import annotations

import random
from typing import Any, Literal

from reinforge.core.env import Action, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.core.seeds import seed_of
from reinforge.envs.adapters.common import first, library, number, said
from reinforge.envs.adapters.opponents import opponent_of
from reinforge.envs.adapters.random_state import RandomState

MOST_PLAYERS = 15


class TextArenaEnv:
    """`player`: the model's seat.

    `players`: seats; found out where not given. `opponent` plays all others (opponents.py). `game`:
    keyword arguments of the game. `brackets`: a turn without square brackets is put into them as a
    whole.

    The reward is the game's, at the end: for most two-player games 1, 0 or -1.
    """

    def __init__(
        self,
        id: str,
        *,
        player: int | Literal["random"] = 0,
        players: int | None = None,
        opponent: str = "random",
        game: dict[str, Any] | None = None,
        brackets: bool = False,
    ):
        self.id = id
        self.seat = player
        self.players = players
        self.game = game or {}
        self.brackets = brackets
        self.opponent = opponent_of(opponent)
        self.player = 0
        self.env: Any = None
        self.chance = RandomState(0)
        # by player: what was not yet shown to them, and whether it is a board
        self.seen: dict[int, list[tuple[str, bool]]] = {}
        self.prepare(id)

    @staticmethod
    def prepare(id: str, **_: Any) -> None:
        ta = library("textarena", "textarena")
        if id not in ta.envs.registration.ENV_REGISTRY:
            raise InputError(
                f"textarena has no game {id!r}.",
                where="env.name",
                fix="textarena.pprint_registry_detailed() lists them.",
            )

    def reset(self, row: Row, seed: int) -> Observation:
        ta = library("textarena", "textarena")
        self.chance = RandomState(seed)
        with self.chance:
            self.env = ta.make(self.id, **self.game)
            while isinstance(self.env, ta.Wrapper):
                self.env = self.env.env
            players = self._begin(seed % 2**32)
        self.player = (
            random.Random(seed).randrange(players) if self.seat == "random" else int(self.seat)
        )
        if not 0 <= self.player < players:
            raise InputError(
                f"{self.id} has {players} players, no seat {self.player}.",
                where="env.options.player",
                fix="Seats are 0, 1, ...",
            )
        done = self._others(seed)
        assert not done, "the game was over before the model's first turn"
        return first(row, self._shown(self.player))

    def step(self, action: Action) -> Step:
        text = (
            action.text if not self.brackets or "[" in action.text else f"[{action.text.strip()}]"
        )
        with self.chance:
            done, _ = self.env.step(text)
        done = done or self._others(action.seed)
        if not done:
            return Step(
                Observation([said(self._shown(self.player))]),
                truncated=action.last,
                metrics={"won": 0.0} if action.last else {},
            )
        rewards, info = self.env.close()
        reward = number(rewards[self.player], "the game's reward")
        metrics = {
            "won": float(reward >= 1),
            "invalid": float(bool(info[self.player].get("invalid_move"))),
        }
        others = [bool(info[p].get("invalid_move")) for p in rewards if p != self.player]
        return Step(
            None,
            reward,
            done=True,
            metrics=metrics | ({"opponent_invalid": float(any(others))} if others else {}),
        )

    def close(self) -> None:
        self.env = None

    # ---- inside ----

    def _begin(self, seed: int) -> int:
        """Resets the game. How many may play, only its assertions know."""
        for players in [self.players] if self.players else range(1, MOST_PLAYERS + 1):
            try:
                self.env.reset(num_players=players, seed=seed)
            except AssertionError:
                continue
            self.seen = {p: [] for p in range(players)}
            return players
        raise InputError(
            f"{self.id} does not take {self.players or f'1 to {MOST_PLAYERS}'} players.",
            where="env.options.players",
        )

    def _others(self, seed: int) -> bool:
        """Plays until it is the model's turn; True when the game is over."""
        with self.chance:
            turn = self._look()
        move = 0
        while turn != self.player:
            said_by_other = self.opponent(
                self._shown(turn), random.Random(seed_of(seed, "opponent", move))
            )
            with self.chance:
                done, _ = self.env.step(said_by_other)
                if done:
                    return True
                turn = self._look()
            move += 1
        return False

    def _look(self) -> int:
        """Whose turn it is; what the game has for them is kept until it is shown.

        Their own words they know.
        """
        player, found = self.env.get_observation()
        names = self.env.state.role_mapping
        for sender, text, kind in found:
            if sender != player or kind.name != "PLAYER_ACTION":
                words = (
                    text if sender == -1 else f"[{names.get(sender, f'Player {sender}')}] {text}"
                )
                self.seen[player].append((words, kind.name == "GAME_BOARD"))
        return int(player)

    def _shown(self, player: int) -> str:
        found, self.seen[player] = self.seen[player], []
        boards = [i for i, (_, board) in enumerate(found) if board]
        # older boards say nothing new
        return "\n".join(
            text for i, (text, board) in enumerate(found) if not board or i == boards[-1]
        )
