"""`python -m tokenloom` is the `tokenloom` command."""

from .cli import main

raise SystemExit(main())
