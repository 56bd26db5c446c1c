"""A second implementation of secure aggregation, which shares no code with the first.

It follows ``docs/secure-aggregation-protocol.md`` with ``cryptography`` and the standard library, computes all
values of one sum from fixed keys and seeds, and has its own Shamir scheme. ``secagg-13.json`` has what
comes out. Run it to compare, or with ``--write`` to make the file anew:

    python tests/vectors/secagg_reference.py
"""

from __future__ import annotations

import json
import math
import struct
import sys
from hashlib import sha256, shake_256
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

FILE = Path(__file__).with_name("secagg-13.json")
ENTRIES = 20
CURVE = ec.SECP256R1()
MIN_HONEST = (
    2  # how many honest clients a sum must have; 0 of a client that also answers without masks
)

# Three sums. On the long list each client deals shares to the k behind it, in a circle. Clients that do not insist on
# sums count among the colluders: on the mixed list, 2 of 6.
CASES = {
    "complete": {
        "members": [2, 3, 5, 8],
        "colluders": 1,
        "k": 0,
        "t": 3,
        "not_dealt": [],
        "gone": [5],
        "bystanders": [],
    },
    "mixed": {
        "members": [1, 2, 4, 6, 7, 9],
        "colluders": 1,
        "k": 0,
        "t": 5,
        "not_dealt": [],
        "gone": [9],
        "bystanders": [4],
    },
    "sparse": {
        "members": list(range(0, 210, 3)),
        "colluders": 1,
        "k": 21,
        "t": 14,
        "not_dealt": [9, 90],
        "gone": [0, 30, 66, 207],
        "bystanders": [],
    },
}


def enc(*values):
    """Encode values one behind the other."""
    out = b""
    for value in values:
        if isinstance(value, str):
            value = value.encode()
        elif isinstance(value, int):
            value = struct.pack(">q", value)
        elif isinstance(value, float):
            value = struct.pack(">d", value)
        out += struct.pack(">I", len(value)) + value
    return out


def transcript(name, *values):
    """Return what is hashed or signed."""
    return b"\x00fedclade/secagg/13/" + name.encode() + b"\x00" + enc(*values)


def hashed(name, *values):
    """Return the SHA-256 digest of a transcript."""
    return sha256(transcript(name, *values)).digest()


def derived(secret, name, *values):
    """Return a key of 32 bytes."""
    info = transcript(name, *values)
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


def fixed(name, number, size=32):
    """Return fixed bytes that stand for random ones."""
    return sha256(f"secagg vector {name} {number}".encode()).digest()[:size]


def private(secret):
    """Return a private key on the curve."""
    return ec.derive_private_key(int.from_bytes(secret, "big"), CURVE)


def public(secret):
    """Return the public half of a private key, compressed."""
    return private(secret).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def ecdh(secret, other):
    """Return what two keys agree on."""
    return private(secret).exchange(
        ec.ECDH(), ec.EllipticCurvePublicKey.from_encoded_point(CURVE, other)
    )


def stream(key):
    """Return the numbers of a mask."""
    return unpacked(
        Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(3 * ENTRIES))
    )


def unpacked(data):
    """Return the numbers of three bytes each."""
    return [int.from_bytes(data[start : start + 3], "little") for start in range(0, len(data), 3)]


def packed(numbers):
    """Return numbers modulo 2^24 as they travel."""
    return b"".join((each % 2**24).to_bytes(3, "little") for each in numbers)


def bits(chosen, members):
    """Return the bitmap of some members."""
    out = [0] * ((len(members) + 7) // 8)
    for place, member in enumerate(members):
        out[place // 8] += (member in chosen) << (place % 8)
    return bytes(out)


def times(a, b):
    """Multiply in GF(2^128) modulo x^128 + x^7 + x^2 + x + 1."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        b >>= 1
        a = a << 1 ^ (0x100000000000000000000000000000087 if a >> 127 else 0)
    return product


def inverse(a):
    """Return 1/a, that is a to the power 2^128 - 2."""
    out = 1
    for _ in range(127):
        a = times(a, a)
        out = times(out, a)
    return out


def share(secret, needed, number, label):
    """Return a share of a secret: 4 bytes of its number, then a value for each padded block."""
    fill = 16 - len(secret) % 16
    padded = secret + bytes([fill]) * fill
    out = struct.pack("<I", number)
    for start in range(0, len(padded), 16):
        value = 0
        for power in range(needed - 1, 0, -1):
            coefficient = int.from_bytes(fixed(f"{label} {start} {power}", 0, 16), "big")
            value = times(value ^ coefficient, number)
        out += (value ^ int.from_bytes(padded[start : start + 16], "big")).to_bytes(16, "big")
    return out


def opened(shares):
    """Return the secret of enough shares: the polynomials' values at 0."""
    numbers = [struct.unpack("<I", each[:4])[0] for each in shares]
    padded = b""
    for start in range(4, len(shares[0]), 16):
        value = 0
        for number, each in zip(numbers, shares, strict=True):
            term = int.from_bytes(each[start : start + 16], "big")
            for other in numbers:
                if other != number:
                    term = times(term, times(other, inverse(other ^ number)))
            value ^= term
        padded += value.to_bytes(16, "big")
    return padded[: -padded[-1]]


def compute(case):
    """Return all values of a sum, bytes as hexadecimal."""
    members, t, k = case["members"], case["t"], case["k"]
    sign = {i: Ed25519PrivateKey.from_private_bytes(fixed("signing", i)) for i in members}
    masking = {i: fixed("masking", i) for i in members}
    sealing = {i: fixed("sealing", i) for i in members}
    seeds = {i: fixed("seed", i, 31) for i in members}
    question, training = hashed("question", "{}").hex(), hashed("training", "{}").hex()
    model = sha256(b"model").hexdigest()
    terms = [
        "instance",
        len(members) + 1,
        case["colluders"],
        k,
        8.0,
        2.0,
        13,
        training,
        question,
        model,
        "",
    ]
    ctx = hashed("terms", 13, *terms)
    keys = {i: (public(masking[i]), public(sealing[i])) for i in members}
    h = {i: 0 if i in case["bystanders"] else MIN_HONEST for i in members}
    suspects = case["colluders"] + len(case["bystanders"])
    assert k or t == (len(members) + suspects) // 2 + 1
    sigma0 = {i: sign[i].sign(transcript("advert", ctx, i, *keys[i], h[i])) for i in members}
    fields = []
    for i in members:
        fields += [i, sign[i].public_key().public_bytes_raw(), *keys[i], h[i], sigma0[i]]
    lam = hashed("list", ctx, len(members), *fields)
    holders = {}
    for place, i in enumerate(members):
        behind = [members[(place + step) % len(members)] for step in range(1, len(members))]
        holders[i] = sorted(behind[:k] if k else behind)
    dealt = [i for i in members if i not in case["not_dealt"]]
    active = [i for i in dealt if i not in case["gone"]]
    first, second = members[0], holders[members[0]][0]
    pair = [
        share(secret, t, 1, label)
        for secret, label in ((seeds[first], "seed"), (masking[first], "key"))
    ]
    shared = ecdh(sealing[first], keys[second][1])
    sealed_by = derived(shared, "share", ctx, lam, first, second)
    nonce = fixed("nonce", first, 12)
    promises = [
        hashed("promise", ctx, lam, name, first, second, s)
        for name, s in zip(("seed", "key"), pair, strict=True)
    ]

    def own_mask(i):
        return stream(derived(seeds[i], "own", ctx, lam, i))

    def pair_mask(i, j):
        return stream(derived(ecdh(masking[i], keys[j][0]), "mask", ctx, lam, min(i, j), max(i, j)))

    def partners(i):
        return [j for j in dealt if j != i and (j in holders[i] or i in holders[j])]

    numbers = {i: unpacked(fixed("numbers", i) + fixed("more", i, 3 * ENTRIES - 32)) for i in dealt}
    masked, sigma1, sigma2 = {}, {}, {}
    delta = hashed("dealt", bits(dealt, members))
    for i in active:
        y = [a + b for a, b in zip(numbers[i], own_mask(i), strict=True)]
        for j in partners(i):
            y = [a + b if i < j else a - b for a, b in zip(y, pair_mask(i, j), strict=True)]
        masked[i] = packed(y)
        sigma1[i] = sign[i].sign(
            transcript("masked", ctx, lam, delta, i, sha256(masked[i]).digest())
        )
        sigma2[i] = sign[i].sign(transcript("agree", ctx, lam, delta, bits(active, members)))
    total = [0] * ENTRIES
    for i in active:
        seed = (
            opened([share(seeds[i], t, number, "seed") for number in range(1, t + 1)])
            if not k
            else seeds[i]
        )
        assert seed == seeds[i]
        y = unpacked(masked[i])
        total = [a + b - c for a, b, c in zip(total, y, own_mask(i), strict=True)]
        for j in set(partners(i)) - set(active):
            total = [a - b if i < j else a + b for a, b in zip(total, pair_mask(i, j), strict=True)]
    total = [each % 2**24 for each in total]
    assert total == [sum(numbers[i][place] for i in active) % 2**24 for place in range(ENTRIES)]
    shown = {
        "terms": terms,
        "ctx": ctx,
        "sigma0": sigma0[first],
        "list": lam,
        "commitment": hashed("seed", ctx, lam, first, seeds[first]),
        "share": {
            "key": sealed_by,
            "seed": pair[0],
            "masking": pair[1],
            "from": first,
            "to": second,
        },
        "sealed": nonce + AESGCM(sealed_by).encrypt(nonce, enc(*pair), None),
        "promise": b"".join(promises),
        "dealt": bits(dealt, members),
        "own": own_mask(active[0])[:16],
        "pair": pair_mask(first, second)[:16],
        "masked": masked[active[0]],
        "all_masked": sha256(b"".join(masked[i] for i in active)).digest(),
        "sigma1": sigma1[active[0]],
        "active": bits(active, members),
        "sigma2": sigma2[active[0]],
        "sum": total,
    }
    return json.loads(json.dumps(shown, default=lambda value: value.hex()))


def mixed(entries, block):
    """Multiply each block of entries by the Hadamard matrix, whose entry i, j is -1 to the number of common bits."""
    out = []
    for start in range(0, len(entries), block):
        for i in range(block):
            terms = [(-1) ** (i & j).bit_count() * entries[start + j] for j in range(block)]
            out.append(math.fsum(terms) / math.sqrt(block))
    return out


def rotated(update, name, question):
    """Return an update after the public rotation: signs, Hadamard blocks, transposition, and both again."""
    block = 1
    while 2 * block <= min(1024, len(update) // 16):
        block *= 2
    rows = -(-len(update) // block)
    size = rows * block
    n_bytes = -(-size // 8)
    drawn = shake_256(b"fedclade signs of a rotation" + name.encode() + question.encode()).digest(
        2 * n_bytes
    )
    signs = [
        [(-1) ** (half[k // 8] >> k % 8 & 1) for k in range(size)]
        for half in (drawn[:n_bytes], drawn[n_bytes:])
    ]
    entries = mixed(
        [a * b for a, b in zip([*update, *[0.0] * (size - len(update))], signs[0], strict=True)],
        block,
    )
    dealt_out = [entries[row * block + column] for column in range(block) for row in range(rows)]
    return mixed([a * b for a, b in zip(dealt_out, signs[1], strict=True)], block)


def encode(case):
    """Return the whole numbers of a client's update, its figures among them."""
    q = (2**23 - 1) // case["clients"]
    steps = min(case["cap"], q)
    weight = max(1, round(min(case["examples"], case["cap"]) / case["cap"] * steps))
    w = weight / steps
    update = [math.sin(1 + 3 * k) for k in range(case["parameters"] + case["buffers"])]
    parts = [("parameters", update[: case["parameters"]], case["norm"])]
    parts.append(("buffers", update[case["parameters"] :], case["norm_of_buffers"]))
    numbers, shares, is_clipped = [], [], 0
    for name, part, most in parts:
        norm = math.hypot(*part)
        scale = min(1.0, most / norm)
        entries = rotated([scale * each for each in part], name, case["question"])
        unit = min(5.0, math.sqrt(len(entries))) * most / (math.sqrt(len(entries)) * q)
        numbers += [round(w * min(max(each / unit, -q), q)) for each in entries]
        shares.append(round(min(1.0, norm / most) ** 2 * q))
        is_clipped |= norm > most
    loss = w * case["loss"]
    numbers += [1] * 8 + [
        weight,
        math.floor(loss),
        round((loss - math.floor(loss)) * q),
        int(is_clipped),
        *shares,
    ]
    return [each % 2**24 for each in numbers]


ENCODING = {
    "clients": 7,
    "parameters": 40,
    "buffers": 4,
    "norm": 8.0,
    "norm_of_buffers": 0.5,
    "cap": 50,
    "examples": 20,
    "loss": 2.25,
    "question": "question",
}


def main():
    """Compare with the file, or write it."""
    found = {name: {**case, **compute(case)} for name, case in CASES.items()}
    found["encoding"] = {**ENCODING, "numbers": encode(ENCODING)}
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    same = found == json.loads(FILE.read_text())
    print(f"{FILE.name}: {'agrees' if same else 'DIFFERS'}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
