"""A real launcher over fake children; usage: fake_set.py CONFIG_JSON [NAME=BEHAVIOUR ...]."""

import sys
from pathlib import Path

import msgspec

from tokenloom.launch import COMMANDS, serve
from tokenloom.wire import log
from tokenloom.wire.config import ServerConfig

config, *behaviours = sys.argv[1:]
behaviour = dict(item.split("=") for item in behaviours)
script = str(Path(__file__).with_name("fake_child.py"))
log.configure("launcher", "debug")
status = serve(
    msgspec.json.decode(config, type=ServerConfig),
    {name: (sys.executable, script, name, behaviour.get(name, "well")) for name in COMMANDS},
)
log.let_go()  # as launch.main ends
sys.exit(status)
