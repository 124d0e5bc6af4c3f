//! What `CUDA_VISIBLE_DEVICES` says, by the rules of the CUDA programming guide ("CUDA environment variables"). Pure.

/// One entry of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Ordinal(u32),
    /// `GPU-` and the beginning of a UUID.
    Gpu(String),
    /// `MIG-`: a slice of a GPU.
    Mig(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum VisibleDevices {
    /// The variable is not set.
    All,
    /// The variable is set and empty.
    Nothing,
    Listed(Vec<Entry>),
    /// The driver takes the entries before the first that it does not understand.
    Cut {
        valid: Vec<Entry>,
        invalid: String,
    },
}

impl VisibleDevices {
    pub fn parse(value: Option<&str>) -> Self {
        let Some(value) = value else {
            return VisibleDevices::All;
        };
        if value.trim().is_empty() {
            return VisibleDevices::Nothing;
        }
        let mut valid = Vec::new();
        for part in value.split(',').map(str::trim) {
            match entry(part) {
                Some(entry) => valid.push(entry),
                None => {
                    let invalid = part.to_owned();
                    return VisibleDevices::Cut { valid, invalid };
                }
            }
        }
        VisibleDevices::Listed(valid)
    }

    pub fn entries(&self) -> &[Entry] {
        match self {
            VisibleDevices::All | VisibleDevices::Nothing => &[],
            VisibleDevices::Listed(entries) | VisibleDevices::Cut { valid: entries, .. } => entries,
        }
    }
}

fn entry(part: &str) -> Option<Entry> {
    const UUID_TEXT: &[char] = &['-', '/'];
    let is_uuid = |rest: &str| {
        !rest.is_empty()
            && rest
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || UUID_TEXT.contains(&c))
    };
    match (part.strip_prefix("GPU-"), part.strip_prefix("MIG-")) {
        (Some(rest), _) if is_uuid(rest) => Some(Entry::Gpu(part.to_owned())),
        (_, Some(rest)) if is_uuid(rest) => Some(Entry::Mig(part.to_owned())),
        _ if part.chars().all(|c| c.is_ascii_digit()) => part.parse().ok().map(Entry::Ordinal),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_not_set_hides_nothing_and_an_empty_one_hides_all() {
        assert_eq!(VisibleDevices::parse(None), VisibleDevices::All);
        assert_eq!(VisibleDevices::parse(Some("")), VisibleDevices::Nothing);
        assert_eq!(VisibleDevices::parse(Some("  ")), VisibleDevices::Nothing);
    }

    #[test]
    fn ordinals_and_uuids_are_listed() {
        let listed = VisibleDevices::parse(Some("1, 0,GPU-8932f937,MIG-41b0-7/1/0"));
        let entries = vec![
            Entry::Ordinal(1),
            Entry::Ordinal(0),
            Entry::Gpu("GPU-8932f937".to_owned()),
            Entry::Mig("MIG-41b0-7/1/0".to_owned()),
        ];
        assert_eq!(listed, VisibleDevices::Listed(entries));
    }

    #[test]
    fn the_first_invalid_entry_hides_itself_and_all_after_it() {
        for (value, invalid) in [("0,x,1", "x"), ("0,-1", "-1"), ("0,GPU-", "GPU-"), ("0,", "")] {
            let cut = VisibleDevices::Cut {
                valid: vec![Entry::Ordinal(0)],
                invalid: invalid.to_owned(),
            };
            assert_eq!(VisibleDevices::parse(Some(value)), cut, "{value}");
        }
    }

    #[test]
    fn a_number_that_is_too_large_is_invalid() {
        let cut = VisibleDevices::parse(Some("99999999999"));
        assert!(cut.entries().is_empty());
        assert!(matches!(cut, VisibleDevices::Cut { .. }));
    }
}
