//! A model's name on the hub: `org/name`, `org/name@REVISION`, `org/name:FILE.gguf`, `org/name:Q4_K_M`.

use std::fmt;

/// The hub's own limit for each half of a repository's name.
const PART_CHARS_MAX: usize = 96;
const REVISION_CHARS_MAX: usize = 128;
const FILE_CHARS_MAX: usize = 512;
const DEFAULT_REVISION: &str = "main";

/// A checked name: no part of it leaves the folder that it is put into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubName {
    repository: String,
    /// A branch, a tag or a commit.
    revision: String,
    /// A GGUF file of the repository, or the word for its quantisation.
    file: Option<String>,
}

impl HubName {
    /// `None` for a text that cannot be a name on the hub.
    pub(crate) fn parse(text: &str) -> Option<HubName> {
        let (text, file) = match text.split_once(':') {
            Some((text, file)) => (text, Some(file)),
            None => (text, None),
        };
        let (repository, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let (organisation, name) = repository.split_once('/')?;
        let is_valid = is_part(organisation)
            && is_part(name)
            && revision.len() <= REVISION_CHARS_MAX
            && is_relative_path(revision)
            && file.is_none_or(|file| file.len() <= FILE_CHARS_MAX && is_relative_path(file));
        is_valid.then(|| HubName {
            repository: repository.to_owned(),
            revision: revision.to_owned(),
            file: file.map(str::to_owned),
        })
    }

    pub(crate) fn repository(&self) -> &str {
        &self.repository
    }

    pub(crate) fn revision(&self) -> &str {
        &self.revision
    }

    pub(crate) fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository)?;
        if self.revision != DEFAULT_REVISION {
            write!(f, "@{}", self.revision)?;
        }
        match &self.file {
            Some(file) => write!(f, ":{file}"),
            None => Ok(()),
        }
    }
}

/// The hub forbids two hyphens in a row, too. The cache separates the halves of a name with them.
fn is_part(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=PART_CHARS_MAX).contains(&text.len())
        && text.bytes().all(is_allowed)
        && !text.starts_with(['-', '.'])
        && !text.ends_with(['-', '.'])
        && !text.contains("--")
        && !text.contains("..")
}

/// Names that stay inside their folder: no empty, hidden or climbing step, and no character that a file system or a terminal
/// takes for something else.
pub(super) fn is_relative_path(text: &str) -> bool {
    let is_step = |step: &str| !step.is_empty() && !step.starts_with('.');
    text.split('/').all(is_step) && !text.chars().any(|c| c.is_control() || c == '\\')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_apart_and_are_printed_as_they_were_given() {
        for (text, parts) in [
            ("org/name", ("org/name", "main", None)),
            ("org/Name-1.5B@v1.0", ("org/Name-1.5B", "v1.0", None)),
            ("org/name@refs/pr/3:Q4_K_M", ("org/name", "refs/pr/3", Some("Q4_K_M"))),
            (
                "o/n:sub/x-00001-of-00002.gguf",
                ("o/n", "main", Some("sub/x-00001-of-00002.gguf")),
            ),
        ] {
            let name = HubName::parse(text).expect(text);
            assert_eq!((name.repository(), name.revision(), name.file()), parts, "{text}");
            assert_eq!(name.to_string(), text);
        }
    }

    #[test]
    fn a_name_that_would_leave_its_folder_is_none() {
        for text in [
            "name",
            "org/",
            "/name",
            "org/name/more",
            "../name",
            "org/..",
            "org/.name",
            "org/na--me",
            "org/name@",
            "org/name:",
            "org/name@../x",
            "org/name@a//b",
            "org/name:../x.gguf",
            "org/name:/etc/x.gguf",
            "org/name:a\\b",
            "org/na me",
            "org/name@x\n",
            "-org/name",
            "org/name.",
        ] {
            assert_eq!(HubName::parse(text), None, "{text:?}");
        }
        assert_eq!(HubName::parse(&format!("org/{}", "n".repeat(97))), None);
    }
}
