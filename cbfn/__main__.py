"""`python -m cbfn`: the command `cbfn`."""

from cbfn.cli import main

if __name__ == "__main__":
    main()
