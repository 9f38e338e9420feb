"""Where the service's log lines go."""

import logging


def log_through_serve() -> None:
    """Sends what engine and app log the way of Serve's own lines, with their level, in this replica's process."""
    serve_logger = logging.getLogger("ray.serve")
    for name in ("engine", "app"):
        logger = logging.getLogger(name)
        logger.handlers = list(serve_logger.handlers)
        logger.setLevel(serve_logger.level)
        logger.propagate = False
