"""Secure aggregation: the server learns the sum of a cluster's updates, and no single one of them.

The protocol is SecAgg+ (Bell, Bonawitz, Gascón, Lepoint, Raykova 2020, "Secure single-server aggregation with
(poly)logarithmic overhead"; its masks, shares and stages are those of Bonawitz et al. 2017, figure 4), once for each
model of a query. Secret sharing, key agreement and encryption are those of Flower's own SecAgg+ and of
``cryptography``. What departs from Flower's:

- Masks are AES in counter mode, as in Bonawitz et al. 2017. Flower's ``pseudo_rand_gen`` folds a seed of 256 bits to
  32, few enough to try all, and is a Mersenne Twister.
- Flower's client gives whatever shares it is asked for, also both of one client, which opens that client's update.
  Here shares are given once, and of each client either the one or the other.
- What all must agree on (the model, the question, the group) is part of every mask: if a server tells two clients
  different things, their masks do not cancel, and it gets noise. Otherwise it could send all but one of them models
  whose updates it knows (Pasquini, Francati, Ateniese 2022).
- A client commits by hashes to its seed and to every share that it deals, and who is given a share checks it. So a
  wrong one is its holder's lie, or was dealt and not readable, and as many holders may lie as need not be there.
- Numbers are rounded to the nearest, in as many steps as a group of its size has room for. Flower's are rounded at
  random by numpy's global generator, so that no run would repeat.
- Flower's mod answers messages of the type ``train`` alone, and its workflow runs one group in a round, by classes of
  the API before ``flwr.serverapp``: neither serves groups side by side, each with its own model.

There is no stage in which clients confirm to one another who has answered (Bonawitz et al. 2017, consistency check), as
Flower has none. A server that lies to them may so get the sum of fewer clients than the threshold t of a group of n,
though of n (2t − n)/t at least: of about half, by default.

``member.py`` is the client's side and ``rounds.py`` the server's; ``terms.py`` is what both agree on.
"""
