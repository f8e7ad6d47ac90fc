"""`python -m ligermodels` is the command line."""

from ligermodels.cli import main

raise SystemExit(main())
