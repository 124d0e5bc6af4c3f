//! Integers as PTX writes them.

/// Decimal, `0x`, `0b`, octal with a leading zero, perhaps with a sign and a final `U`.
pub(super) fn number(text: &str) -> Option<i128> {
    if text == "WARP_SZ" {
        return Some(32);
    }
    let (digits, sign) = text.strip_prefix('-').map_or((text, 1), |digits| (digits, -1));
    let digits = digits.strip_suffix('U').unwrap_or(digits);
    let (digits, radix) = match digits.split_at_checked(2) {
        Some(("0x" | "0X", digits)) => (digits, 16),
        Some(("0b" | "0B", digits)) => (digits, 2),
        Some(_) if digits.starts_with('0') => (&digits[1..], 8),
        _ => (digits, 10),
    };
    let value = u64::from_str_radix(digits, radix).ok()?;
    Some(sign * i128::from(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_read_in_every_form_of_ptx() {
        let cases = [
            ("0", 0),
            ("42", 42),
            ("-7", -7),
            ("0x1F", 31),
            ("0b101", 5),
            ("017", 15),
            ("4294967295U", 0xffff_ffff),
        ];
        for (text, value) in cases {
            assert_eq!(number(text), Some(value), "{text}");
        }
        for text in ["", "-", "%r1", "0x", "1.5", "x"] {
            assert_eq!(number(text), None, "{text}");
        }
    }
}
