//! What is done to a text before it is cut into words.

use std::borrow::Cow;

use unicode_normalization_alignments::UnicodeNormalization;

/// One change to a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Put in front of a text that is not empty, and only where a fragment begins.
    Prepend(String),
    /// `from` is not empty.
    Replace {
        from: String,
        to: String,
    },
    Unicode(UnicodeForm),
}

/// The normal forms of Unicode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnicodeForm {
    Nfc,
    Nfd,
    Nfkc,
    Nfkd,
}

/// `begins_fragment`: a control token or nothing stands before the text.
pub(super) fn normalize<'a>(steps: &[Step], text: &'a str, begins_fragment: bool) -> Cow<'a, str> {
    let mut text = Cow::Borrowed(text);
    for step in steps {
        match step {
            Step::Prepend(prefix) if begins_fragment && !text.is_empty() => {
                text = Cow::Owned([prefix, &*text].concat());
            }
            Step::Replace { from, to } if text.contains(from) => text = Cow::Owned(text.replace(from, to)),
            // ASCII is in every normal form.
            Step::Unicode(form) if !text.is_ascii() => text = Cow::Owned(form.of(&text)),
            Step::Prepend(_) | Step::Replace { .. } | Step::Unicode(_) => {}
        }
    }
    text
}

impl UnicodeForm {
    /// The name in a tokenizer.json.
    pub(super) fn name(self) -> &'static str {
        match self {
            UnicodeForm::Nfc => "NFC",
            UnicodeForm::Nfd => "NFD",
            UnicodeForm::Nfkc => "NFKC",
            UnicodeForm::Nfkd => "NFKD",
        }
    }

    /// The tables are those of the `tokenizers` crate, so that ids do not differ for characters of newer Unicode versions.
    fn of(self, text: &str) -> String {
        match self {
            UnicodeForm::Nfc => text.nfc().map(|(character, _)| character).collect(),
            UnicodeForm::Nfd => text.nfd().map(|(character, _)| character).collect(),
            UnicodeForm::Nfkc => text.nfkc().map(|(character, _)| character).collect(),
            UnicodeForm::Nfkd => text.nfkd().map(|(character, _)| character).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_done_in_order() {
        let steps = [
            Step::Prepend("▁".into()),
            Step::Replace {
                from: " ".into(),
                to: "▁".into(),
            },
            Step::Unicode(UnicodeForm::Nfc),
        ];
        assert_eq!(normalize(&steps, "a e\u{301}", true), "▁a▁é");
        assert_eq!(normalize(&steps, "a b", false), "a▁b");
        assert_eq!(normalize(&steps, "", true), "");
        assert_eq!(normalize(&[Step::Unicode(UnicodeForm::Nfkc)], "ﬁ", true), "fi");
    }
}
