//! One config struct per process. A flag wins over the environment, that over the file, that over the default. The origin
//! of each value is known.
//!
//! A config struct is plain: `#[derive(Debug, Clone, clap::Args, serde::Serialize)]`, one field per key, `#[arg(long, ..)]` on each,
//! no `env` attribute. The field name is the key: `max_num_seqs` is `--max-num-seqs`, `BATON_MAX_NUM_SEQS` and
//! `max_num_seqs = ..` in the TOML file. Lists need `value_delimiter = ','`. A value must serialize as it is written
//! (enums: `#[serde(rename_all = "kebab-case")]`), so that `--print-config` can be read back.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use serde::Serialize;
use thiserror::Error;

mod explain;
mod layers;

pub use crate::units::ByteSize;
use explain::explain;
use layers::{add_layer, environment_layer, file_layer};

const CONFIG_KEY: &str = "config";
const PRINT_KEY: &str = "print_config";
/// How a process was started: a flag only, and no key of its configuration.
const STDIN_KEY: &str = "exit_with_stdin";
/// For the checker of a test run. Like the config file's path it is about this start, not about the process's work.
const EVENT_LOG_KEY: &str = "event_log";
const ENV_PREFIX: &str = "BATON_";
/// A config file is a page of text. A larger file is a mistake, such as a model file.
const CONFIG_FILE_BYTES_MAX: u64 = 1 << 20;

/// Where a value came from, strongest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Flag,
    Environment,
    File(PathBuf),
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Flag => f.write_str("flag"),
            Origin::Environment => f.write_str("environment"),
            Origin::File(path) => write!(f, "file {}", path.display()),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// The name and version in `--help` and `--version`.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// `baton-decode-node`
    pub name: &'static str,
    pub about: &'static str,
    pub version: &'static str,
}

#[derive(Debug)]
pub struct Loaded<T> {
    pub config: T,
    /// By key. Every key of the config is in it.
    pub origins: BTreeMap<String, Origin>,
    /// `--exit-with-stdin` was given.
    pub exit_with_stdin: bool,
    /// The path of the event log, if one is wanted.
    pub event_log: Option<PathBuf>,
}

/// The result of reading the command line.
#[derive(Debug)]
pub enum Outcome<T> {
    Run(Loaded<T>),
    /// `--help`, `--version`, `--print-config`: print this on stdout and exit 0.
    Print(String),
}

/// The user can repair each of these. The exit code is 2.
#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("{0}")]
    Usage(String),
    #[error("bad value for `{key}` from {origin}: `{value}`: {allowed}; see --help")]
    BadValue {
        key: String,
        value: String,
        origin: Origin,
        allowed: String,
    },
    #[error("unknown key `{key}` in {file}: {hint}", file = .file.display())]
    UnknownKey { key: String, file: PathBuf, hint: String },
    #[error("`{key}` is required: give {flag}, {env}, or `{key} = ..` in the config file")]
    Missing { key: String, flag: String, env: String },
    #[error("cannot read the config file {file}: {source}", file = .file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("the config file {file} has {bytes} bytes, over {CONFIG_FILE_BYTES_MAX}; is it the right file?", file = .file.display())]
    FileTooLarge { file: PathBuf, bytes: u64 },
    #[error("the config file {file} is not TOML, line {line}: {why}", file = .file.display())]
    Toml { file: PathBuf, line: usize, why: String },
    #[error("the configuration cannot be printed: {source}; this is a bug in baton")]
    Print { source: toml::ser::Error },
}

/// Loads from `args`, which start with a program name, and the environment. `Err` is the code to return from `main`; everything
/// has been printed then (help, version, configuration: 0, on stdout; an error: 2, on stderr).
///
/// # Errors
/// The exit code.
pub(crate) fn load_args_or_print<T: clap::Args + Serialize>(
    program: Program,
    args: impl IntoIterator<Item = OsString>,
) -> Result<Loaded<T>, ExitCode> {
    match load(program, args, &|name| std::env::var(name).ok()) {
        Ok(Outcome::Run(loaded)) => Ok(loaded),
        Ok(Outcome::Print(text)) => {
            use std::io::Write as _;
            let _ = writeln!(std::io::stdout().lock(), "{}", text.trim_end());
            Err(ExitCode::SUCCESS)
        }
        Err(error) => {
            eprintln!("{}: {error}", program.name);
            Err(ExitCode::from(2))
        }
    }
}

/// The same with the environment passed in.
///
/// # Errors
/// [`ConfigError`]; each names the key and where the value came from.
pub fn load<T: clap::Args + Serialize>(
    program: Program,
    args: impl IntoIterator<Item = OsString>,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Outcome<T>, ConfigError> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    if args.is_empty() {
        args.push(program.name.into());
    }
    let command = command_of::<T>(program);
    let relaxed = command.clone().mut_args(|arg| arg.required(false));
    let mut origins = BTreeMap::new();

    let matches = match relaxed.clone().try_get_matches_from(&args) {
        Ok(matches) => matches,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return Ok(Outcome::Print(error.to_string()));
        }
        Err(error) => return Err(explain(&error, &Origin::Flag)),
    };
    mark_given(&command, &matches, &mut origins);

    let layer = environment_layer(&command, &origins, env)?;
    add_layer(&mut args, layer, &Origin::Environment, &mut origins);
    let matches = relaxed
        .try_get_matches_from(&args)
        .map_err(|error| explain(&error, &Origin::Environment))?;

    let mut weakest = Origin::Environment;
    if let Some(file) = matches.get_one::<PathBuf>(CONFIG_KEY) {
        weakest = Origin::File(file.clone());
        let layer = file_layer(&command, &origins, file)?;
        add_layer(&mut args, layer, &weakest, &mut origins);
    }
    let matches = command
        .clone()
        .try_get_matches_from(&args)
        .map_err(|error| explain(&error, &weakest))?;
    for arg in config_args(&command) {
        origins.entry(arg.get_id().to_string()).or_insert(Origin::Default);
    }
    origins.retain(|key, _| key != CONFIG_KEY && key != EVENT_LOG_KEY);
    let config = T::from_arg_matches(&matches).map_err(|error| explain(&error, &weakest))?;
    if matches.get_flag(PRINT_KEY) {
        return Ok(Outcome::Print(print_config(&config, &origins)?));
    }
    Ok(Outcome::Run(Loaded {
        config,
        origins,
        exit_with_stdin: matches.get_flag(STDIN_KEY),
        event_log: matches.get_one::<PathBuf>(EVENT_LOG_KEY).cloned(),
    }))
}

/// The defaults of a process, except for `keys`, which the environment may set.
///
/// # Errors
/// A bad value in the environment, or a missing key that has no default.
pub fn without_flags<T: clap::Args + Serialize>(program: Program, keys: &[&str]) -> Result<T, ConfigError> {
    let is_wanted = |name: &str| keys.iter().any(|key| env_name(key) == name);
    let env = |name: &str| std::env::var(name).ok().filter(|_| is_wanted(name));
    match load(program, [program.name.into()], &env)? {
        Outcome::Run(loaded) => Ok(loaded.config),
        Outcome::Print(text) => Err(ConfigError::Usage(text)),
    }
}

/// `key = value  # origin`, valid TOML that `--config` reads back. Keys without a value are comments.
///
/// # Errors
/// A value that TOML cannot hold.
pub(crate) fn print_config<T: Serialize>(
    config: &T,
    origins: &BTreeMap<String, Origin>,
) -> Result<String, ConfigError> {
    use fmt::Write as _;
    let table = toml::Table::try_from(config).map_err(|source| ConfigError::Print { source })?;
    let mut out = String::new();
    for (key, origin) in origins {
        let _ = match table.get(key) {
            Some(value) => writeln!(out, "{key} = {value}  # {origin}"),
            None => writeln!(out, "# {key} is not set"),
        };
    }
    Ok(out)
}

fn command_of<T: clap::Args>(program: Program) -> Command {
    let command = Command::new(program.name).about(program.about).version(program.version);
    T::augment_args(command)
        // The documentation of a flattened struct would take the place of the program's own line.
        .about(program.about)
        .long_about(None)
        .arg(
            Arg::new(CONFIG_KEY)
                .long("config")
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .help("TOML file with the keys below"),
        )
        .arg(
            Arg::new(EVENT_LOG_KEY)
                .long("event-log")
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .help(
                    "Append one JSON line for each step of each request to this file; several processes may share one",
                ),
        )
        .arg(
            Arg::new(PRINT_KEY)
                .long("print-config")
                .action(ArgAction::SetTrue)
                .help("Print every key, its value and where it came from as TOML, and exit"),
        )
        .arg(
            Arg::new(STDIN_KEY)
                .long("exit-with-stdin")
                .action(ArgAction::SetTrue)
                .help("Drain when stdin ends: for processes started by another one, as `baton up` does"),
        )
        .mut_args(|arg| {
            if is_flag_only(&arg) {
                return arg;
            }
            let env = env_name(arg.get_id().as_str());
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            arg.help(format!("{help} [env: {env}]"))
        })
}

/// Neither the environment nor a file can set it.
fn is_flag_only(arg: &Arg) -> bool {
    matches!(arg.get_id().as_str(), PRINT_KEY | STDIN_KEY | "help" | "version")
}

fn config_args(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| !is_flag_only(arg))
}

fn env_name(key: &str) -> String {
    format!("{ENV_PREFIX}{}", key.to_ascii_uppercase())
}

fn flag_name(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

fn mark_given(command: &Command, matches: &ArgMatches, origins: &mut BTreeMap<String, Origin>) {
    for arg in config_args(command) {
        let key = arg.get_id().as_str();
        if matches.value_source(key) == Some(ValueSource::CommandLine) {
            origins.insert(key.to_owned(), Origin::Flag);
        }
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
