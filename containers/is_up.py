"""Whether a server answers over TLS, with a certificate that this authority has signed: ``is_up.py ADDRESS CA``."""

import ssl
import sys
import urllib.request

address, authority = sys.argv[1:]
urllib.request.urlopen(
    address, context=ssl.create_default_context(cafile=authority), timeout=5
).close()
