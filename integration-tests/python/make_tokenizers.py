"""Trains a small vocabulary for each family of tokenizers, and writes the ids that the reference libraries give for 2,000 strings.

    python integration-tests/python/make_tokenizers.py [FOLDER] [--real MODEL.gguf]
    python integration-tests/python/make_tokenizers.py --check FOLDER STRINGS IDS
    python integration-tests/python/make_tokenizers.py --ids MODEL.gguf STRINGS IDS

The first form writes FOLDER (integration-tests/data/tokenizers when it is left out), which the tests of crates/model-files read:
`strings.json.gz` (the strings, for all families), and for each family `NAME.json.gz` with its vocabulary and `NAME.ids.gz` with one
line of ids for each string. `--real` adds `smollm2-real.ids.gz`: the ids of the vocabulary in that file (`baton model pull smollm2-135m`).
The second form loads FOLDER (`baton model export-tokenizer FOLDER` writes one) with transformers.AutoTokenizer, as a client does, and
compares its ids for STRINGS with IDS. The third form writes into IDS what the sentencepiece library gives for the vocabulary in a GGUF file.

Made with tokenizers 0.23.3, sentencepiece 0.2.3, transformers 5.24.0 and gguf 0.19.0 for Python 3.11. The result is the same each time.
"""

import gzip
import json
import random
import sys
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data"
STRING_COUNT = 2000

# Sentences in many scripts, so that each vocabulary has tokens of them.
MIXED = """
Die Straße führt über den Fluß, und große Bäume säumen ihr Ufer. Où est le café ? L'été, il fait très chaud à Besançon.
¿Dónde está la niña? El año pasado llovió mucho. Ela não está aqui; a irmã também não. Zażółć gęślą jaźń. Příliš žluťoučký kůň.
Москва стоит на реке, а река течёт на юг. Книга лежит на столе, и стол стоит у окна. Η θάλασσα είναι ήσυχη το πρωί. Το φως πέφτει στο νερό.
今天天气很好，我们去公园散步。他说他不知道那本书在哪里。中国人民的生活很好。日本語の文章は、漢字とひらがなとカタカナで書かれます。今日はいい天気ですね。
오늘은 날씨가 좋아서 공원에 갔습니다. 책은 책상 위에 있습니다. यह किताब मेज़ पर है और वह घर जा रहा है। हम कल नदी के पास गए थे।
הספר נמצא על השולחן, והחלון פתוח. الكتاب على الطاولة والنافذة مفتوحة. ذهبنا إلى النهر أمس. วันนี้อากาศดีมาก เราไปเดินเล่นในสวน
Hôm nay trời đẹp quá, chúng tôi đi dạo trong công viên. Bugün hava çok güzel, İstanbul'da yürüdük. 👍🏽 😀 🎉 🦀 👨‍👩‍👧 ❤️ 🇫🇷
def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\nfor (int i = 0; i < 1024; ++i) { sum += a[i] * b[i]; }
{"name": "value", "list": [1, 2, 3, 10, 100, 2026], "flag": true}\n<p class="x">Hello &amp; goodbye</p>\nhttps://example.org/path?query=1&other=2#part
"""

SPECIALS = {
    "llama-bpe": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"],
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "gpt-2": ["<|endoftext|>"],
    "smollm": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"],
    "tekken": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
    "gpt-4o": ["<|endoftext|>", "<|end|>"],
    "deepseek-v3": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"],
    "deepseek-coder": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<|EOT|>"],
}

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The steps before ByteLevel: patterns whose matches are words, or "digits" for the Digits step.
WORDS = {
    "llama-bpe": [LLAMA3],
    "qwen2": [QWEN2],
    "gpt-2": [GPT2],
    "smollm": ["digits", GPT2],
    "tekken": [TEKKEN],
    "gpt-4o": [GPT4O],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", "digits"],
}
IGNORES_MERGES = {"llama-bpe", "tekken"}


def corpus():
    text = (DATA / "golden" / "ppl.txt").read_text(encoding="utf-8") + MIXED * 4
    return [line for line in text.splitlines(keepends=True) if line.strip()]


def make_strings():
    """Strings of one to twelve parts: words, other scripts, digits, white space, emoji, broken bytes and control tokens as text."""
    draw = random.Random(16)
    words = (DATA / "golden" / "ppl.txt").read_text(encoding="utf-8").split()
    mixed = MIXED.split()
    specials = sorted({text for texts in SPECIALS.values() for text in texts} | {"<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"})
    spaces = [" ", " ", " ", "  ", "   ", "        ", "\n", "\n\n", "\r\n", "\t", " \n", "\u00a0", "\u2003", "\u3000", "\v", "\f", "\u0085", "\u2028"]
    contractions = ["'s", "'S", "'ll", "'LL", "don't", "I'VE", "'", "''", "\u2019s", "'\u017f", "x'd"]
    marks = ["\u0301", "e\u0301", "\u0928\u093f", "\ufe0f", "\u200d", "\u200b", "A\u030a", "\u1e9b\u0323", "\uac00\u11a8", "\ufb01"]
    signs = ["!", "?!", "...", "--", "_", "__init__", "/", "//", "\\", "$5.00", "a/b", "#", "(", ")]", "«", "»", "…", "€", "½", "²", "Ⅷ", "٣٤", "１２", "▁", "▁▁a", "\x00", "\x7f", "\u00ad", "\ufffd"]
    broken = [bytes(draw.randrange(256) for _ in range(draw.randrange(1, 6))).decode("utf-8", errors="replace") for _ in range(60)]
    byte_texts = ["<0x0A>", "<0xff>", "<unk>", "<|im_sta", "rt|>", "<|", "|>", "<s", "[INST"]

    def part():
        kind = draw.randrange(20)
        if kind < 6:
            return draw.choice(words)
        if kind < 9:
            return draw.choice(mixed)
        if kind < 10:
            return str(draw.randrange(10 ** draw.randrange(1, 9)))
        if kind < 11:
            return draw.choice(contractions)
        if kind < 13:
            return draw.choice(signs)
        if kind < 14:
            return draw.choice(specials)
        if kind < 15:
            return draw.choice(marks)
        if kind < 16:
            return draw.choice(broken)
        if kind < 17:
            return draw.choice(byte_texts)
        if kind < 18:
            return "".join(chr(draw.choice([draw.randrange(32, 127), draw.randrange(0xA0, 0x250), draw.randrange(0x370, 0x1000), draw.randrange(0x3000, 0xA000), draw.randrange(0x1F300, 0x1FA00)])) for _ in range(draw.randrange(1, 5)))
        return draw.choice(spaces) * draw.randrange(1, 4)

    strings = {"": None, " ": None, "\n": None, "▁": None, "a" * 300: None, " " * 70: None, "1" * 50: None, "<s></s>": None}
    while len(strings) < STRING_COUNT:
        text = ""
        for _ in range(draw.randrange(1, 13)):
            text += part() + draw.choice(["", " ", " ", " "])
        strings[text if draw.randrange(4) else text.strip(" ")] = None
    return list(strings)


def train_byte_level(name):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    steps = [
        pre_tokenizers.Digits(individual_digits=True) if step == "digits" else pre_tokenizers.Split(Regex(step), "isolated")
        for step in WORDS[name]
    ]
    if name in ("gpt-2", "smollm"):
        # As their own files have it: the pattern is part of ByteLevel.
        steps[-1] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    content = json.loads(tokenizer.to_str())
    if name in IGNORES_MERGES:
        content["model"]["ignore_merges"] = True
        # Tokens that no merge makes: only a model that ignores merges for whole words gives them.
        parts = {part for merge in content["model"]["merges"] for part in merge}
        merges = content["model"]["merges"]
        lonely = [merge for merge in merges if "".join(merge) not in parts and len("".join(merge)) > 3]
        content["model"]["merges"] = [merge for merge in merges if merge not in lonely[::3]]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS[name]])
    begin = SPECIALS[name][0]
    if name in ("llama-bpe", "deepseek-v3"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return tokenizer


def train_sentencepiece(style):
    import io

    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    settings = dict(
        model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.999,
        split_digits=True, num_threads=1, minloglevel=2, allow_whitespace_only_pieces=True, max_sentence_length=100000,
    )
    if style == "gemma":
        settings.update(
            vocab_size=1400, byte_fallback=True, add_dummy_prefix=False, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
            control_symbols=["<start_of_turn>", "<end_of_turn>"],
            user_defined_symbols=["\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<table>", "<unused0>", "the end", "[@BOS@]"],
        )
    elif style in ("llama", "unused"):
        settings.update(vocab_size=1400, byte_fallback=True, add_dummy_prefix=True)
    else:
        settings.update(vocab_size=700, byte_fallback=False, add_dummy_prefix=True, user_defined_symbols=["[INST]", "▁of▁the"])
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(corpus()), model_writer=model, **settings)
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    # A few tokens that are given as the two that they came from. In one vocabulary some of them can come from two pairs.
    texts = {piece.piece for piece in proto.pieces if piece.type in (1, 4)}
    for piece in [p for p in proto.pieces if p.type == 1 and len(p.piece) > 2][::20]:
        cuts = [(piece.piece[:i], piece.piece[i:]) for i in range(1, len(piece.piece))]
        pairs = [cut for cut in cuts if all(len(half) == 1 or half in texts for half in cut)]
        if style == "unused" or (style == "gemma" and len(pairs) == 1):
            piece.type = 5
    return proto


def sentencepiece_ids(proto, strings):
    """The library does not parse control tokens, so the text between them is encoded by itself, as llama.cpp does."""
    import re

    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    control = {piece.piece: id for id, piece in enumerate(proto.pieces) if piece.type in (2, 3)}
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(control, key=len, reverse=True))) + ")")
    for text in strings:
        ids = []
        for part in pattern.split(text):
            if part in control:
                ids.append(control[part])
            elif part:
                ids.extend(model.encode(part))
        yield ids


def library_tokenizer(proto, style):
    """A tokenizer.json as Hugging Face's converter makes it from a SentencePiece model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import generate_merges

    vocabulary = {piece.piece: id for id, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, generate_merges(vocabulary, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=True, dropout=None)
    )
    replace = normalizers.Replace(" ", "▁")
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        decoder.append(decoders.Strip(" ", 1, 0))
    elif style == "gemma":
        tokenizer.normalizer = replace
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=style == "split")
    tokenizer.decoder = decoders.Sequence(decoder)
    for piece in proto.pieces:
        if piece.type in (2, 3, 4):
            # Phi-3's tokens take the white space behind them.
            strips = style == "first" and piece.piece == "</s>"
            token = AddedToken(piece.piece, normalized=False, special=piece.type != 4, rstrip=strips)
            tokenizer.add_special_tokens([token]) if piece.type != 4 else tokenizer.add_tokens([token])
    return tokenizer


def real_tokenizer(path):
    """The vocabulary in a GGUF file of SmolLM2, with the pre-tokenizer of its tokenizer.json."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text, kind in zip(tokens, kinds) if kind == 3])
    return tokenizer


def sentencepiece_of(path):
    """The SentencePiece model that a GGUF file was converted from."""
    from gguf import GGUFReader
    from sentencepiece import sentencepiece_model_pb2

    fields = GGUFReader(path).fields
    proto = sentencepiece_model_pb2.ModelProto()
    names = ("tokens", "scores", "token_type")
    for text, score, kind in zip(*(fields[f"tokenizer.ggml.{name}"].contents() for name in names)):
        # llama.cpp's converter writes user-defined tokens with spaces, and with a score of -1000 instead of 0.
        user_defined = kind == 4
        proto.pieces.add(piece=text.replace(" ", "▁") if user_defined else text, score=0 if user_defined else score, type=kind)
    proto.trainer_spec.model_type = 2
    proto.trainer_spec.byte_fallback = True
    for kind in ("bos", "eos", "unk"):
        id = fields[f"tokenizer.ggml.{'unknown' if kind == 'unk' else kind}_token_id"].contents()
        setattr(proto.trainer_spec, f"{kind}_id", id)
        setattr(proto.trainer_spec, f"{kind}_piece", proto.pieces[id].piece)
    proto.trainer_spec.pad_id = -1
    prefix = fields.get("tokenizer.ggml.add_space_prefix")
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = prefix is None or prefix.contents()
    proto.normalizer_spec.remove_extra_whitespaces = False
    return proto


def write(path, text):
    with open(path, "wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        file.write(text.encode("utf-8"))


def write_ids(folder, name, all_ids):
    all_ids = list(all_ids)
    assert len(all_ids) == STRING_COUNT
    write(folder / f"{name}.ids.gz", "".join(" ".join(map(str, ids)) + "\n" for ids in all_ids))


def library_ids(tokenizer, strings):
    return (tokenizer.encode(text, add_special_tokens=False).ids for text in strings)


def make(folder, real):
    folder.mkdir(parents=True, exist_ok=True)
    strings = make_strings()
    write(folder / "strings.json.gz", json.dumps(strings, ensure_ascii=False, indent=0))
    for name in WORDS:
        tokenizer = train_byte_level(name)
        write(folder / f"{name}.json.gz", tokenizer.to_str())
        write_ids(folder, name, library_ids(tokenizer, strings))
    for style in ("llama", "gemma", "unknown", "unused"):
        proto = train_sentencepiece(style)
        pieces = [[piece.piece, piece.score, piece.type] for piece in proto.pieces]
        write(folder / f"sentencepiece-{style}.json.gz", json.dumps(pieces, ensure_ascii=False))
        write_ids(folder, f"sentencepiece-{style}", sentencepiece_ids(proto, strings))
        for library_style in {"llama": ("prepend", "first", "split"), "gemma": ("gemma",)}.get(style, ()):
            tokenizer = library_tokenizer(proto, library_style)
            write(folder / f"metaspace-{library_style}.json.gz", tokenizer.to_str())
            write_ids(folder, f"metaspace-{library_style}", library_ids(tokenizer, strings))
    if real:
        write_ids(folder, "smollm2-real", library_ids(real_tokenizer(real), strings))


def check(folder, strings, ids):
    from transformers import AutoTokenizer

    strings = json.loads(gzip.open(strings, "rt", encoding="utf-8").read())
    expected = [[int(id) for id in line.split()] for line in gzip.open(ids, "rt").read().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = [tokenizer.encode(text, add_special_tokens=False) for text in strings]
    different = [text for text, a, b in zip(strings, found, expected) if a != b]
    print(f"{len(strings) - len(different)} of {len(strings)} strings have equal ids; bos {tokenizer.bos_token!r}, eos {tokenizer.eos_token!r}")
    for text in different[:10]:
        print("different:", repr(text))
    return bool(different)


def main(arguments):
    if arguments[:1] == ["--check"]:
        return check(*arguments[1:])
    if arguments[:1] == ["--ids"]:
        model, strings, ids = arguments[1:]
        strings = json.loads(gzip.open(strings, "rt", encoding="utf-8").read())
        all_ids = sentencepiece_ids(sentencepiece_of(model), strings)
        write(ids, "".join(" ".join(map(str, ids)) + "\n" for ids in all_ids))
        return 0
    real = None
    if "--real" in arguments:
        at = arguments.index("--real")
        real = arguments[at + 1]
        del arguments[at : at + 2]
    make(Path(arguments[0]) if arguments else DATA / "tokenizers", real)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
