"""``python -m nanoinfer`` is the command ``nanoinfer``, also where no script was put on the PATH."""

from __future__ import annotations

from nanoinfer.cli.app import main

main()
