"""`ligermodels convert` as a script: python convert/convert_checkpoint.py SRC DST [options]; --help lists them."""

import sys

from ligermodels import cli


def main(argv: list[str] | None = None) -> int:
    return cli.main(["convert", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
