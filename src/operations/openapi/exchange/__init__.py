"""One exchange with a service: as whom, how often, what comes back."""
