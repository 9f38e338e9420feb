"""What clients see when something breaks: real engines on a local Ray Serve, real HTTP clients, real faults."""
