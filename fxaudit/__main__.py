"""``python -m fxaudit``."""

from fxaudit.cli import main

if __name__ == "__main__":
    main(prog_name="fxaudit")
