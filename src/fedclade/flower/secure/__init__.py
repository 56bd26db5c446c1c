"""Secure aggregation: the server learns the sum of a cluster's updates, and no single one of them.

The masks, shares and stages are those of Bonawitz et al. 2017 ("Practical secure aggregation for
privacy-preserving machine learning"), once for each model of a query.
``docs/secure-aggregation.md`` states what it guarantees against a server that lies, and
``docs/secure-aggregation-protocol.md`` has the protocol step by step, and a proof. The main
differences to Flower's SecAgg+ and to the protocol of 2017 are:

- Every secret and signature is bound to the terms of the sum (the model, the training, the group)
  and to the whole list of its clients. A server that tells two clients different things gets noise
  and shares that nobody can read.
- Clients sign for whom they have masked, and then whose updates are added up. Shares are given only
  if more than half of all clients, and of the colluding ones, have signed the same sum.
- On long lists each client draws its own holders, after it has seen the list. So the server cannot
  choose them.
- A client commits by hashes to its seed and to every share that it deals, and who is given a share
  checks it. So a wrong one is its holder's lie, or was dealt and not readable.
- Masks are AES in counter mode. Those of Flower come from a Mersenne Twister with a seed of 32
  bits.
- An answer to a training question becomes part of one sum only.

``member.py`` is the client's side, ``server.py`` and ``group.py`` are the server's; ``terms.py``
has the terms that both agree on.
"""
