"""`python -m ssl_sec <command> ...` is `ssl-sec <command> ...`."""

from ssl_sec.edges.commands import main

if __name__ == "__main__":
    main()
