//! The environment and the config file as flags that are put before the user's own.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use clap::{Arg, ArgAction, Command};

use super::explain::{nearest_key, shown};
use super::{CONFIG_FILE_BYTES_MAX, CONFIG_KEY, ConfigError, Origin, config_args, env_name, flag_name};

/// The flags that a layer adds, by key. It adds only keys that no stronger layer has set.
pub(super) type Layer = Vec<(String, Vec<OsString>)>;

pub(super) fn add_layer(
    args: &mut Vec<OsString>,
    layer: Layer,
    origin: &Origin,
    origins: &mut BTreeMap<String, Origin>,
) {
    for (key, flags) in layer {
        // The flags are put right after the program's name, so that the user's own words, also `--`, come after them.
        args.splice(1..1, flags);
        origins.insert(key, origin.clone());
    }
}

pub(super) fn environment_layer(
    command: &Command,
    origins: &BTreeMap<String, Origin>,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Layer, ConfigError> {
    let mut layer = Vec::new();
    for arg in config_args(command) {
        let key = arg.get_id().to_string();
        if origins.contains_key(&key) {
            continue;
        }
        // An empty variable counts as not set. Compose files and systemd units write unset variables like this.
        if let Some(value) = env(&env_name(&key)).filter(|value| !value.is_empty()) {
            let flags = flags_of(arg, vec![value], &Origin::Environment)?;
            layer.push((key, flags));
        }
    }
    Ok(layer)
}

pub(super) fn file_layer(
    command: &Command,
    origins: &BTreeMap<String, Origin>,
    file: &Path,
) -> Result<Layer, ConfigError> {
    let read_error = |source| ConfigError::Read {
        file: file.to_owned(),
        source,
    };
    let bytes = std::fs::metadata(file).map_err(read_error)?.len();
    if bytes > CONFIG_FILE_BYTES_MAX {
        return Err(ConfigError::FileTooLarge {
            file: file.to_owned(),
            bytes,
        });
    }
    let text = std::fs::read_to_string(file).map_err(read_error)?;
    // The library's own words have the line itself, which may hold a password.
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let before = error.span().map_or(0, |span| span.start);
        ConfigError::Toml {
            file: file.to_owned(),
            line: text.bytes().take(before).filter(|byte| *byte == b'\n').count() + 1,
            why: error.message().to_owned(),
        }
    })?;
    let origin = Origin::File(file.to_owned());
    let mut layer = Vec::new();
    for (key, value) in table {
        let arg = config_args(command).find(|arg| arg.get_id().as_str() == key && key != CONFIG_KEY);
        let Some(arg) = arg else {
            let hint = nearest_key(&key, command);
            return Err(ConfigError::UnknownKey {
                key,
                file: file.to_owned(),
                hint,
            });
        };
        let values = scalar_texts(&key, value, &origin)?;
        if !origins.contains_key(&key) {
            layer.push((key, flags_of(arg, values, &origin)?));
        }
    }
    Ok(layer)
}

fn scalar_texts(key: &str, value: toml::Value, origin: &Origin) -> Result<Vec<String>, ConfigError> {
    let bad = |value: String, allowed: &str| ConfigError::BadValue {
        key: key.to_owned(),
        value: shown(&value),
        origin: origin.clone(),
        allowed: allowed.to_owned(),
    };
    match value {
        toml::Value::String(text) => Ok(vec![text]),
        toml::Value::Integer(_) | toml::Value::Float(_) | toml::Value::Boolean(_) => Ok(vec![value.to_string()]),
        toml::Value::Array(items) if items.is_empty() => Err(bad(
            "[]".to_owned(),
            "a list needs at least one value; leave the key out instead",
        )),
        toml::Value::Array(items) => {
            let mut texts = Vec::new();
            for item in items {
                if item.is_array() || item.is_table() {
                    return Err(bad(item.to_string(), "a list holds plain values"));
                }
                texts.extend(scalar_texts(key, item, origin)?);
            }
            Ok(texts)
        }
        toml::Value::Table(_) | toml::Value::Datetime(_) => Err(bad(
            value.to_string(),
            "keys are flat: a string, a number, true or false, or a list of these",
        )),
    }
}

fn flags_of(arg: &Arg, values: Vec<String>, origin: &Origin) -> Result<Vec<OsString>, ConfigError> {
    let key = arg.get_id().as_str();
    let flag = arg
        .get_long()
        .map_or_else(|| flag_name(key), |long| format!("--{long}"));
    if !matches!(arg.get_action(), ArgAction::SetTrue) {
        return Ok(values
            .into_iter()
            .map(|value| format!("{flag}={value}").into())
            .collect());
    }
    match values.as_slice() {
        [value] if matches!(value.as_str(), "true" | "1" | "yes" | "on") => Ok(vec![flag.into()]),
        [value] if matches!(value.as_str(), "false" | "0" | "no" | "off") => Ok(Vec::new()),
        _ => Err(ConfigError::BadValue {
            key: key.to_owned(),
            value: shown(&values.join(",")),
            origin: origin.clone(),
            allowed: "allowed are true and false".to_owned(),
        }),
    }
}
