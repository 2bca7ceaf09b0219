"""`onebox eval`: the same questions to one or two servers; exact answers, likelihoods and a verdict with confidence."""
