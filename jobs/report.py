"""Our results compared with the papers': python -m jobs.report table=5, figure=6 or compare <run> <run>."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("report")
