"""Two processes on one machine hold one mesh together and give the tokens of one device."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "two_processes.py"
DEVICES_EACH = 2


@pytest.mark.multi
def test_two_processes_give_the_tokens_of_one_device() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "XLA_FLAGS": ""}
    command = [sys.executable, str(SCRIPT), address]
    running = [
        subprocess.Popen(
            [*command, str(number), str(DEVICES_EACH)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    specification = importlib.util.spec_from_file_location("two_processes", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    expected = json.loads(json.dumps(module.run(None)))
    for process in running:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        assert json.loads(output.splitlines()[-1]) == expected
