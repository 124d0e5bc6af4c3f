//! The messages about a value or a key that cannot be used.

use std::error::Error as _;

use clap::Command;
use clap::error::{ContextKind, ErrorKind};
use strsim::levenshtein;

use super::{CONFIG_KEY, ConfigError, Origin, config_args, env_name, flag_name};

pub(super) fn explain(error: &clap::Error, origin: &Origin) -> ConfigError {
    let text = |kind| error.get(kind).map(ToString::to_string);
    let key = text(ContextKind::InvalidArg).unwrap_or_default();
    let key = key
        .trim_start_matches('-')
        .split([' ', '='])
        .next()
        .unwrap_or_default()
        .replace('-', "_");
    match error.kind() {
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let allowed = match (text(ContextKind::ValidValue), error.source()) {
                (Some(valid), _) if !valid.is_empty() => format!("allowed are {valid}"),
                (_, Some(source)) => source.to_string(),
                _ => "not allowed".to_owned(),
            };
            let value = text(ContextKind::InvalidValue).unwrap_or_default();
            ConfigError::BadValue {
                key,
                value: shown(&value),
                origin: origin.clone(),
                allowed,
            }
        }
        ErrorKind::MissingRequiredArgument => ConfigError::Missing {
            flag: flag_name(&key),
            env: env_name(&key),
            key,
        },
        _ => ConfigError::Usage(shown(error.to_string().trim_start_matches("error: ").trim_end())),
    }
}

/// A user's text for a message, which may go into a log: of an address with a password, `SCHEME://USER:PASSWORD@HOST`, what stands
/// before the host is left out.
pub(super) fn shown(text: &str) -> String {
    let parts = text
        .split_once("://")
        .and_then(|(scheme, rest)| Some((scheme, rest.rsplit_once('@')?.1)));
    match parts {
        Some((scheme, host)) => format!("{scheme}://***@{host}"),
        None => text.to_owned(),
    }
}

pub(super) fn nearest_key(unknown: &str, command: &Command) -> String {
    let keys: Vec<&str> = config_args(command)
        .map(|arg| arg.get_id().as_str())
        .filter(|key| *key != CONFIG_KEY)
        .collect();
    let unknown = unknown.replace('-', "_").to_ascii_lowercase();
    let nearest = keys.iter().min_by_key(|key| (levenshtein(key, &unknown), **key));
    match nearest {
        Some(key) if levenshtein(key, &unknown) <= key.len().max(3) / 2 => format!("did you mean `{key}`?"),
        _ => format!("valid keys are {}", keys.join(", ")),
    }
}
