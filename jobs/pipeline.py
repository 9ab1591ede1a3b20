"""Runs dependent jobs on the cluster; jobs.submit starts it there, with --then or for a sweep."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("pipeline")
