//! The environment variables that all tools of the hub share.

use std::env;
use std::fs;
use std::path::PathBuf;

use crate::model::error::PullError;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// A token has under a hundred characters. A longer file is something else.
const TOKEN_BYTES_MAX: u64 = 4096;

/// Where the hub and its cache are.
#[derive(Clone)]
pub(crate) struct HubSettings {
    /// Without a slash at its end.
    pub endpoint: String,
    pub(super) cache: Option<PathBuf>,
    pub token: Option<String>,
    /// The network is not to be used.
    pub is_offline: bool,
}

impl std::fmt::Debug for HubSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubSettings")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("has_token", &self.token.is_some())
            .field("is_offline", &self.is_offline)
            .finish()
    }
}

impl HubSettings {
    /// `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`, `HOME`, `HF_TOKEN`, `HF_TOKEN_PATH` and `HF_HUB_OFFLINE`.
    pub(crate) fn from_env() -> HubSettings {
        HubSettings::from_variables(&|name| env::var(name).ok())
    }

    fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> HubSettings {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let home = set("HF_HOME").map(PathBuf::from).or_else(|| {
            let caches = set("XDG_CACHE_HOME").map(PathBuf::from);
            let caches = caches.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")));
            Some(caches?.join("huggingface"))
        });
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        let token_path = set("HF_TOKEN_PATH").map(PathBuf::from);
        let token_path = token_path.or_else(|| Some(home.as_ref()?.join("token")));
        let cache = set("HF_HUB_CACHE").map(PathBuf::from);
        HubSettings {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache: cache.or_else(|| Some(home.as_ref()?.join("hub"))),
            token: set("HF_TOKEN").or_else(|| token_in(token_path?)),
            is_offline: set("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value)),
        }
    }

    /// The folder of the cache.
    ///
    /// # Errors
    /// [`PullError::NoCacheFolder`]: no variable names one.
    pub(crate) fn cache(&self) -> Result<PathBuf, PullError> {
        self.cache.clone().ok_or(PullError::NoCacheFolder)
    }

    #[cfg(test)]
    pub(crate) fn of_test(endpoint: String, cache: PathBuf) -> HubSettings {
        HubSettings {
            endpoint,
            cache: Some(cache),
            token: None,
            is_offline: false,
        }
    }
}

/// The token that `hf auth login` has left.
fn token_in(path: PathBuf) -> Option<String> {
    if fs::metadata(&path).ok()?.len() > TOKEN_BYTES_MAX {
        return None;
    }
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|token| !token.is_empty())
}

fn is_true(value: &str) -> bool {
    matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> HubSettings {
        HubSettings::from_variables(&|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_more_special_variable_says_where_the_cache_is() {
        let cache = |variables: &[(&str, &str)]| settings(variables).cache().ok();
        assert_eq!(cache(&[]), None);
        let all = [
            ("HOME", "/home"),
            ("XDG_CACHE_HOME", "/xdg"),
            ("HF_HOME", "/hf"),
            ("HF_HUB_CACHE", "/hub"),
        ];
        assert_eq!(cache(&all[..1]), Some("/home/.cache/huggingface/hub".into()));
        assert_eq!(cache(&all[..2]), Some("/xdg/huggingface/hub".into()));
        assert_eq!(cache(&all[..3]), Some("/hf/hub".into()));
        assert_eq!(cache(&all), Some("/hub".into()));
    }

    #[test]
    fn the_token_comes_from_the_variable_or_the_file_and_is_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        assert_eq!(settings(&[("HF_HOME", home)]).token, None);
        fs::write(folder.path().join("token"), "secret-1\n").unwrap();
        assert_eq!(settings(&[("HF_HOME", home)]).token.as_deref(), Some("secret-1"));
        let both = settings(&[("HF_HOME", home), ("HF_TOKEN", "secret-2")]);
        assert_eq!(both.token.as_deref(), Some("secret-2"));
        assert!(!format!("{both:?}").contains("secret"));
    }

    #[test]
    fn offline_is_a_word_for_yes() {
        for (value, is_offline) in [("1", true), ("true", true), ("0", false), ("", false), ("off", false)] {
            assert_eq!(settings(&[("HF_HUB_OFFLINE", value)]).is_offline, is_offline, "{value}");
        }
        assert_eq!(settings(&[("HF_ENDPOINT", "http://h:1/")]).endpoint, "http://h:1");
        assert_eq!(settings(&[]).endpoint, DEFAULT_ENDPOINT);
    }
}
