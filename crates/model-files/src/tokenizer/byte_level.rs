//! The bytes that tokens stand for: GPT-2's table between bytes and printable characters, and SentencePiece's space mark.

use super::cuts::SPACE_MARK;
use super::special::TokenKind;

/// Bytes that stand for themselves in a vocabulary.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The character a byte is written as: itself when printable, else the next one from U+0100 on.
pub(crate) fn char_of_byte(byte: u8) -> char {
    if is_printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&other| !is_printable(other)).count() as u32;
    char::from_u32(0x100 + rank).unwrap_or(char::REPLACEMENT_CHARACTER)
}

fn byte_of_char(character: char) -> Option<u8> {
    match u8::try_from(u32::from(character)) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => {
            let rank = u32::from(character).checked_sub(0x100)?;
            (0..=255u8)
                .filter(|&byte| !is_printable(byte))
                .nth(usize::try_from(rank).ok()?)
        }
    }
}

/// Raw bytes of a token as the vocabulary writes it. Control and user-defined tokens are plain text, and so is a
/// token with a character outside the table (Hugging Face reads them so too).
pub(super) fn token_bytes(token: &str, kind: TokenKind) -> Box<[u8]> {
    if kind.is_parsed_whole() {
        return token.as_bytes().into();
    }
    let bytes: Option<Vec<u8>> = token.chars().map(byte_of_char).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec()).into()
}

/// Raw bytes of a token in which a mark stands for a space (SentencePiece).
pub(super) fn without_marks(token: &str) -> Box<[u8]> {
    token.replace(SPACE_MARK, " ").into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_a_bijection_and_knows_the_famous_characters() {
        for byte in 0..=255 {
            assert_eq!(byte_of_char(char_of_byte(byte)), Some(byte));
        }
        assert_eq!(
            (char_of_byte(b' '), char_of_byte(b'\n'), char_of_byte(0xAD)),
            ('Ġ', 'Ċ', 'Ń')
        );
        assert_eq!(byte_of_char(' '), None);
        assert_eq!(byte_of_char('\u{144}'), None);
        assert_eq!(&*token_bytes("Ġwö", TokenKind::Normal), b" w\xF6");
        assert_eq!(&*token_bytes("Ġ", TokenKind::Control), "Ġ".as_bytes());
        assert_eq!(&*token_bytes("a b", TokenKind::Normal), b"a b");
    }
}
