"""Where the service's log lines go."""

import logging


def log_through_serve() -> None:
    """Sends what engine and app log the way of Serve's own lines, with their level, in this replica's process."""
    serve_logger = logging.getLogger("ray.serve")
    serve_logger.addFilter(is_worth_a_line)
    for name in ("engine", "app"):
        logger = logging.getLogger(name)
        logger.handlers = list(serve_logger.handlers)
        logger.setLevel(serve_logger.level)
        logger.propagate = False


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """All but that an ingress asked the others for their metrics, which happens at each scrape."""
    return not record.getMessage().startswith("CALL own_metrics OK")
