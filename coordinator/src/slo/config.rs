//! The SLO profiles and the objective: the built-in ones, or those of a TOML file (`slo_config`).

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serving_core::request::Lane;
use thiserror::Error;
use toml::Spanned;

use super::SloProfile;

/// The share of requests that the service promises to be good, where no file says otherwise.
const OBJECTIVE: f64 = 0.995;
/// Name, longest TTFT in ms and longest gap between tokens in ms.
const BUILT_IN: [(&str, u64, u64); 6] = [
    ("chat", 300, 50),
    ("voice", 150, 30),
    ("code-inline", 100, 25),
    ("code-panel", 300, 50),
    ("rag", 400, 80),
    ("async-batch", 3_000, 200),
];
/// A profile is four lines.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Each profile is a value of a label: with two lanes and five breaches a profile has fourteen series.
const PROFILES_MAX: usize = 32;
const NAME_BYTES_MAX: usize = 64;
/// Ten minutes: the default time limit of a request.
const LIMIT_MS_MAX: f64 = 600_000.0;

/// What the service promises.
#[derive(Clone, Debug, PartialEq)]
pub struct SloConfig {
    /// In the order of the file.
    profiles: Vec<Arc<SloProfile>>,
    /// They judge a request of their lane where no rule fits.
    interactive: Arc<SloProfile>,
    batch: Arc<SloProfile>,
    objective: f64,
}

impl Default for SloConfig {
    fn default() -> Self {
        let profiles = BUILT_IN.map(|(name, ttft_ms, itl_ms)| {
            Arc::new(SloProfile {
                name: name.to_owned(),
                ttft_max: Duration::from_millis(ttft_ms),
                itl_max: Duration::from_millis(itl_ms),
            })
        });
        let [first, .., last] = &profiles;
        Self {
            interactive: first.clone(),
            batch: last.clone(),
            profiles: profiles.to_vec(),
            objective: OBJECTIVE,
        }
    }
}

/// Why a file is refused. Each names the file, and the line where there is one.
#[derive(Debug, Error)]
pub enum SloConfigError {
    #[error("cannot read the SLO file {file}: {source}", file = .file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("the SLO file {file} has more than {FILE_BYTES_MAX} bytes; is it the right file?", file = .file.display())]
    TooLarge { file: PathBuf },
    #[error("the SLO file {file}, line {line}: {why}", file = .file.display())]
    Line { file: PathBuf, line: usize, why: BadSlo },
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum BadSlo {
    /// No TOML, a key that is not known, or a value of another type.
    #[error("{0}")]
    Toml(String),
    #[error("objective = {0}: write the share of requests that must be good, above 0 and below 1, such as 0.995")]
    Objective(f64),
    #[error("name = \"{0}\": write 1 to {NAME_BYTES_MAX} of a-z, A-Z, 0-9, - and _")]
    Name(String),
    #[error("there is a profile \"{0}\" above: give one of the two another name")]
    Twice(String),
    #[error("{key} = {value}: write milliseconds, above 0 and at most {LIMIT_MS_MAX}")]
    Limit { key: &'static str, value: f64 },
    #[error("more than {PROFILES_MAX} profiles: remove those that judge nothing")]
    TooMany,
}

/// What is wrong, and at which byte of the text.
type Bad = (usize, BadSlo);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    objective: Option<Spanned<f64>>,
    #[serde(default)]
    profile: Vec<ProfileText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileText {
    name: Spanned<String>,
    ttft_ms_max: Spanned<f64>,
    itl_ms_max: Spanned<f64>,
}

impl SloConfig {
    /// Reads a file. What it leaves out is as built in: the objective, or all profiles.
    ///
    /// # Errors
    /// [`SloConfigError`], for the first mistake.
    pub fn load(file: &Path) -> Result<Self, SloConfigError> {
        let cannot_read = |source| SloConfigError::Read {
            file: file.to_owned(),
            source,
        };
        let mut text = String::new();
        let opened = File::open(file).map_err(cannot_read)?;
        let mut limited = opened.take(FILE_BYTES_MAX + 1);
        limited.read_to_string(&mut text).map_err(cannot_read)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(SloConfigError::TooLarge { file: file.to_owned() });
        }
        Self::parse(&text).map_err(|(at, why)| SloConfigError::Line {
            file: file.to_owned(),
            line: text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1,
            why,
        })
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        let read: FileText = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            (at, BadSlo::Toml(error.message().to_owned()))
        })?;
        let mut config = Self::default();
        if let Some(objective) = read.objective {
            let share = *objective.get_ref();
            let is_share = share > 0.0 && share < 1.0;
            if !is_share {
                return Err((objective.span().start, BadSlo::Objective(share)));
            }
            config.objective = share;
        }
        let mut profiles: Vec<Arc<SloProfile>> = Vec::new();
        for written in &read.profile {
            let profile = written.checked(&profiles)?;
            profiles.push(Arc::new(profile));
        }
        if let (Some(first), Some(last)) = (profiles.first(), profiles.last()) {
            config.interactive = first.clone();
            config.batch = last.clone();
            config.profiles = profiles;
        }
        Ok(config)
    }

    /// At least one, in the order of the file.
    pub fn profiles(&self) -> &[Arc<SloProfile>] {
        &self.profiles
    }

    pub fn by_name(&self, name: &str) -> Option<&Arc<SloProfile>> {
        self.profiles.iter().find(|profile| profile.name == name)
    }

    /// All names, for people.
    pub(crate) fn names(&self) -> String {
        let names: Vec<&str> = self.profiles.iter().map(|profile| profile.name.as_str()).collect();
        names.join(", ")
    }

    /// The profile of a lane for which there is no rule: the first one for interactive, the last one for batch.
    pub(crate) fn of_lane(&self, lane: Lane) -> &Arc<SloProfile> {
        match lane {
            Lane::Interactive => &self.interactive,
            Lane::Batch => &self.batch,
        }
    }

    /// The share of requests that the service promises to be good, above 0 and below 1.
    pub(crate) fn objective(&self) -> f64 {
        self.objective
    }
}

impl ProfileText {
    /// `above`: the profiles that stand before it.
    fn checked(&self, above: &[Arc<SloProfile>]) -> Result<SloProfile, Bad> {
        let (at, name) = (self.name.span().start, self.name.get_ref());
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(is_plain) {
            let shown = name.chars().take(NAME_BYTES_MAX).flat_map(char::escape_default);
            return Err((at, BadSlo::Name(shown.collect())));
        }
        if above.iter().any(|known| known.name == *name) {
            return Err((at, BadSlo::Twice(name.clone())));
        }
        if above.len() >= PROFILES_MAX {
            return Err((at, BadSlo::TooMany));
        }
        Ok(SloProfile {
            name: name.clone(),
            ttft_max: limit("ttft_ms_max", &self.ttft_ms_max)?,
            itl_max: limit("itl_ms_max", &self.itl_ms_max)?,
        })
    }
}

fn limit(key: &'static str, written: &Spanned<f64>) -> Result<Duration, Bad> {
    let value = *written.get_ref();
    let is_limit = value > 0.0 && value <= LIMIT_MS_MAX;
    match is_limit {
        true => Ok(Duration::from_secs_f64(value / 1e3)),
        false => Err((written.span().start, BadSlo::Limit { key, value })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The limits that the documentation promises, in the form of a file.
    const AS_BUILT_IN: &str = "\
objective = 0.995
profile = [
  { name = \"chat\", ttft_ms_max = 300, itl_ms_max = 50 },
  { name = \"voice\", ttft_ms_max = 150, itl_ms_max = 30 },
  { name = \"code-inline\", ttft_ms_max = 100, itl_ms_max = 25 },
  { name = \"code-panel\", ttft_ms_max = 300, itl_ms_max = 50.0 },
  { name = \"rag\", ttft_ms_max = 400, itl_ms_max = 80 },
  { name = \"async-batch\", ttft_ms_max = 3000, itl_ms_max = 200 },
]
";

    #[test]
    fn a_file_with_the_built_in_values_changes_nothing_and_neither_does_an_empty_one() {
        assert_eq!(SloConfig::parse(AS_BUILT_IN), Ok(SloConfig::default()));
        assert_eq!(SloConfig::parse(""), Ok(SloConfig::default()));
    }

    #[test]
    fn the_profiles_of_a_file_take_the_place_of_the_built_in_ones() {
        let text = "[[profile]]\nname = \"fast\"\nttft_ms_max = 80\nitl_ms_max = 7.5\n\
                    [[profile]]\nname = \"slow\"\nttft_ms_max = 9000\nitl_ms_max = 900\n";
        let config = SloConfig::parse(text).expect("a file");
        assert_eq!(config.names(), "fast, slow");
        assert!((config.objective() - OBJECTIVE).abs() < 1e-12);
        let fast = config.by_name("fast").expect("it is there");
        let limits = (Duration::from_millis(80), Duration::from_micros(7_500));
        assert_eq!((fast.ttft_max, fast.itl_max), limits);
        assert!(config.by_name("chat").is_none());
        let of_lanes = Lane::ALL.map(|lane| config.of_lane(lane).name.as_str());
        assert!(of_lanes.contains(&"fast") && of_lanes.contains(&"slow"), "{of_lanes:?}");
    }

    #[test]
    fn each_mistake_is_refused_at_its_line() {
        let profile = |name: &str, ttft: &str, itl: &str| {
            format!("objective = 0.99\n[[profile]]\nname = {name}\nttft_ms_max = {ttft}\nitl_ms_max = {itl}\n")
        };
        let twice = format!(
            "{}[[profile]]\nname = \"a\"\nttft_ms_max = 1\nitl_ms_max = 1\n",
            profile("\"a\"", "1", "1")
        );
        let many: String = (0..=PROFILES_MAX)
            .map(|i| format!("[[profile]]\nname = \"p{i}\"\nttft_ms_max = 1\nitl_ms_max = 1\n"))
            .collect();
        let texts = [
            ("objective = 1.0".to_owned(), 1),
            ("objective = nan".to_owned(), 1),
            ("\n\nobjectives = 0.9".to_owned(), 3),
            (profile("\"a b\"", "1", "1"), 3),
            (profile("\"\"", "1", "1"), 3),
            (profile("\"a\"", "0", "1"), 4),
            (profile("\"a\"", "\"1\"", "1"), 4),
            (profile("\"a\"", "1", "600001"), 5),
            (profile("\"a\"", "1", "1\nitl = 3"), 6),
            (twice, 7),
            (many, PROFILES_MAX * 4 + 2),
        ];
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("slo.toml");
        for (text, expected) in texts {
            std::fs::write(&path, &text).expect("written");
            let error = SloConfig::load(&path).expect_err(&text);
            assert!(error.to_string().contains("slo.toml"), "{error}");
            let SloConfigError::Line { line, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(line, expected, "{text}");
        }
    }

    #[test]
    fn a_file_that_is_not_there_or_not_a_page_of_text_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("slo.toml");
        let error = SloConfig::load(&path).expect_err("not there");
        assert!(matches!(&error, SloConfigError::Read { .. }), "{error}");
        std::fs::write(&path, "#".repeat(70_000)).expect("written");
        let error = SloConfig::load(&path).expect_err("too large");
        assert!(matches!(&error, SloConfigError::TooLarge { .. }), "{error}");
    }
}
