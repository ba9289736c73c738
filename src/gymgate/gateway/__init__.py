"""The gateway: every model call of every rollout, each to its own rollout's endpoint, recorded on the way.

async with Gateway() as gateway:
    route = gateway.open(HTTPEndpoint(base_url="http://host:8000/v1"))
    ...                       # agents call route.base_url
    await route.close()
    route.calls               # requests and answers
"""
