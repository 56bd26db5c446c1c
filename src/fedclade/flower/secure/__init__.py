"""Secure aggregation: the server learns the sum of a cluster's updates, but no single update.

The masks, shares and stages follow Bonawitz et al. 2017 ("Practical secure aggregation for
privacy-preserving machine learning"). Only updates of clients that receive the same model are added
up, in one or several sums.
``docs/secure-aggregation.md`` states the guarantees against a malicious server, and
``docs/secure-aggregation-protocol.md`` has the protocol step by step, and a proof. The main
differences from Flower's SecAgg+ and from the protocol of 2017 are:

- Every secret and signature is bound to the terms of the sum (the model, the training, the group)
  and to the whole list of its clients. A server that sends two clients different terms or lists
  receives only noise, and shares that cannot be decrypted.
- Clients sign the list of clients with which they have masked, and then the list of clients whose
  updates are added up. With n clients of which c may collude, clients release shares only if more
  than (n + c) / 2 clients have signed the same sum.
- On long lists each client draws at random which clients receive its shares (their holders), after
  it has received the list. So the server cannot choose the holders.
- A client commits by hashes to its seed and to every share that it deals, and the holder of a share
  checks the share. So a wrong share shows that its holder is malicious, or that its dealer has
  dealt a share that the holder could not read.
- Masks are drawn by AES in counter mode. The masks of Flower come from a Mersenne Twister with a
  seed of 32 bits.
- The reply to a training request becomes part of one sum only.

``member.py`` is the client's side, ``server.py`` and ``group.py`` are the server's side;
``terms.py`` has the terms that both sides agree on.
"""
