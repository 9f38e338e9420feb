"""A fleet of replicas on a virtual clock: real engine cores and real routers, and an executor that only knows times."""
