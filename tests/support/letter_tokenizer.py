"""A tokenizer of one printable character per token."""


class LetterTokenizer:
    def __init__(self, vocab_size, stop_token_ids=frozenset({0})):
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids

    def encode(self, text, *, add_special_tokens=True):
        del add_special_tokens
        return [ord(character) % self.vocab_size for character in text]

    def decode(self, token_ids):
        return "".join(self.token_bytes(token_id).decode() for token_id in token_ids)

    def token_bytes(self, token_id):
        return bytes([32 + token_id % 94])

    def token_name(self, token_id):
        return f"<{token_id}>"
