"""One exchange with a service: credentials, attempts and the response."""
