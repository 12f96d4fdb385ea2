"""A sandbox on another machine that speaks SandboxFusion's protocol: POST {url}/run_code, JSON in
and out.

That service is trusted to contain programs; verdicts are still given here. A service that cannot be
reached, or that says "SandboxError", gives `refused`: unscored, never 0.
"""

from __future__ import annotations

import base64
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reinforge.sandbox.plain import dumps, encode
from reinforge.sandbox.program import MIB, Limits, Program, Result

# theirs for ours; they build C as C++
NAMES = {"python": "python", "c": "cpp", "bash": "bash", "node": "nodejs"}
SPARE_SECONDS = 60.0  # for their queue and the way there
LARGEST_REPLY = 64 * MIB
HERE = Path(__file__).parent


def run_remote(url: str, program: Program, limits: Limits) -> Result:
    stdin = (
        program.stdin.decode("utf-8", "replace")
        if isinstance(program.stdin, bytes)
        else program.stdin
    )
    files = {
        name: base64.b64encode(data if isinstance(data, bytes) else data.encode()).decode()
        for name, data in program.files.items()
    }
    body: dict[str, Any] = {
        "code": program.code,
        "language": NAMES.get(program.language, program.language),
        "stdin": stdin,
        "files": files,
        "compile_timeout": limits.seconds,
        "run_timeout": limits.seconds,
        "memory_limit_MB": limits.memory_mb,
    }
    request = urllib.request.Request(
        f"{url.rstrip('/')}/run_code",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(
            request, timeout=2 * limits.seconds + SPARE_SECONDS
        ) as response:
            said = json.loads(response.read(LARGEST_REPLY))
    except (OSError, ValueError) as error:  # no connection, an HTTP error, no JSON
        return Result("refused", reason=f"{url}: {error}")
    return result_of(said, limits)


def result_of(said: Any, limits: Limits) -> Result:
    """What the service said, in our words."""
    if not isinstance(said, dict) or said.get("status") not in ("Success", "Failed"):
        return Result(
            "refused",
            reason=str(said.get("message") if isinstance(said, dict) else said)[:300]
            or "SandboxError",
        )
    run = said.get("run_result") or said.get("compile_result") or {}
    cap = limits.output_kb * 1024
    out, err = ((run.get(name) or "").encode("utf-8", "replace") for name in ("stdout", "stderr"))
    code = run.get("return_code")
    seconds = float(run.get("execution_time") or 0.0)
    if run.get("status") == "TimeLimitExceeded":
        return Result("timeout", None, None, out[:cap], err[:cap], seconds)
    if run.get("status") != "Finished":
        return Result("refused", reason=str(said.get("message") or run)[:300])
    if len(out) > cap or len(err) > cap:
        return Result("output", code, None, out[:cap], err[:cap], seconds)
    if isinstance(code, int) and code < 0:
        return Result("crashed", None, -code, out, err, seconds, reason=f"signal {-code}")
    return Result(
        "ok" if code == 0 else "crashed",
        code,
        None,
        out,
        err,
        seconds,
        reason="" if code == 0 else f"exit code {code}",
    )


def calls_program(
    code: str, name: str, arguments: Sequence[Sequence[Any]]
) -> tuple[Program, list[str]]:
    """One program that loads a solution and makes all calls (without a channel they go in by stdin
    and come out by stdout), and the nonces by which its replies are found. The first is that of
    loading.
    """
    sources = [(n, (HERE / f"{n}.py").read_text(encoding="utf-8")) for n in ("plain", "solution")]
    start = f"""import sys, types
for name in ("reinforge", "reinforge.sandbox"):
    sys.modules[name] = types.ModuleType(name)
for name, text in {sources!r}:
    module = types.ModuleType("reinforge.sandbox." + name)
    sys.modules[module.__name__] = module
    exec(compile(text, name, "exec"), module.__dict__)
with open("solution_to_load.py", "w", encoding="utf-8", errors="surrogatepass") as file:
    file.write({code!r})
sys.modules["reinforge.sandbox.solution"].serve(sys.stdin.buffer, 1, "solution_to_load.py", b"\\n")
"""
    nonces = [secrets.token_hex(8) for _ in range(len(arguments) + 1)]
    lines = [dumps({"nonce": nonces[0]})]
    lines += [
        dumps({"nonce": n, "call": name, "args": encode(list(a)), "kwargs": encode({})})
        for n, a in zip(nonces[1:], arguments, strict=True)
    ]
    return Program(start, stdin=b"\n".join(lines) + b"\n"), nonces
