"""`onebox eval`: the same questions to one server or two, exact answers, likelihoods, a verdict with confidence."""
