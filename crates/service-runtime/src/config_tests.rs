//! Precedence, origins, printing and error messages of the configuration.

use std::collections::HashMap;
use std::io::Write as _;

use super::*;

#[derive(Clone, Debug, PartialEq, clap::Args, Serialize)]
struct Sample {
    /// Where to listen.
    #[arg(long, default_value = "127.0.0.1:1")]
    listen: String,
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    #[arg(long, default_value = "512MiB")]
    kv_cache_memory: ByteSize,
    #[arg(long, value_delimiter = ',', default_value = "a:1")]
    coordinators: Vec<String>,
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    prefix_cache: bool,
    #[arg(long)]
    co_located: bool,
    #[arg(long, value_enum, default_value = "stand-in")]
    engine: Kind,
    #[arg(long)]
    model: PathBuf,
    #[arg(long)]
    nickname: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Cpu,
    StandIn,
}

const PROGRAM: Program = Program {
    name: "sample",
    about: "A sample.",
    version: "1.2.3",
};

struct Given {
    args: Vec<&'static str>,
    env: HashMap<&'static str, &'static str>,
    file: Option<String>,
}

impl Given {
    fn args(args: &[&'static str]) -> Self {
        Self {
            args: args.to_vec(),
            env: HashMap::new(),
            file: None,
        }
    }
    fn env(mut self, name: &'static str, value: &'static str) -> Self {
        self.env.insert(name, value);
        self
    }
    fn file(mut self, text: &str) -> Self {
        self.file = Some(text.to_owned());
        self
    }
    fn load(self) -> Result<Outcome<Sample>, ConfigError> {
        let mut args: Vec<OsString> = vec!["sample".into()];
        args.extend(self.args.iter().map(Into::into));
        let mut file = tempfile::NamedTempFile::new().unwrap();
        if let Some(text) = &self.file {
            file.write_all(text.as_bytes()).unwrap();
            args.push("--config".into());
            args.push(file.path().into());
        }
        load(PROGRAM, args, &|name| {
            self.env.get(name).map(|value| (*value).to_owned())
        })
    }
    fn run(self) -> Loaded<Sample> {
        match self.load() {
            Ok(Outcome::Run(loaded)) => loaded,
            other => panic!("{other:?}"),
        }
    }
    fn error(self) -> String {
        self.load().unwrap_err().to_string()
    }
}

#[test]
fn flag_beats_environment_beats_file_beats_default() {
    let file = "threads = 8\nlisten = \"file:1\"\nmodel = \"/file\"\nnickname = \"f\"";
    let given = Given::args(&["--threads", "16"])
        .env("BATON_THREADS", "12")
        .env("BATON_LISTEN", "env:1")
        .file(file);
    let loaded = given.run();
    assert_eq!(loaded.config.threads, 16);
    assert_eq!(loaded.config.listen, "env:1");
    assert_eq!(loaded.config.model, PathBuf::from("/file"));
    assert_eq!(loaded.config.kv_cache_memory, ByteSize::mib(512));
    assert_eq!(loaded.origins["threads"], Origin::Flag);
    assert_eq!(loaded.origins["listen"], Origin::Environment);
    assert!(matches!(loaded.origins["model"], Origin::File(_)));
    assert_eq!(loaded.origins["kv_cache_memory"], Origin::Default);
    assert_eq!(loaded.origins.len(), 9);
}

#[test]
fn lists_and_booleans_come_from_every_layer() {
    let file = "coordinators = [\"x:1\", \"y:2\"]\nprefix_cache = false\nco_located = true\nengine = \"cpu\"";
    let config = Given::args(&["--model=m"]).file(file).run().config;
    assert_eq!(config.coordinators, ["x:1", "y:2"]);
    assert!(!config.prefix_cache && config.co_located);
    assert_eq!(config.engine, Kind::Cpu);

    let given = Given::args(&["--model=m"])
        .env("BATON_COORDINATORS", "p:1,q:2")
        .env("BATON_CO_LOCATED", "false");
    let loaded = given.file(file).run();
    assert_eq!(loaded.config.coordinators, ["p:1", "q:2"]);
    assert!(!loaded.config.co_located);
    assert_eq!(loaded.origins["co_located"], Origin::Environment);
}

#[test]
fn printed_config_reads_back_to_the_same_config() {
    let args = [
        "--model=/m.gguf",
        "--coordinators=a:1,b:2",
        "--co-located",
        "--engine=cpu",
        "--print-config",
    ];
    let Ok(Outcome::Print(text)) = Given::args(&args).env("BATON_THREADS", "3").load() else {
        panic!("nothing printed")
    };
    assert!(text.contains("threads = 3  # environment\n"), "{text}");
    assert!(text.contains("kv_cache_memory = \"512MiB\"  # default\n"), "{text}");
    assert!(text.contains("# nickname is not set\n"), "{text}");
    let direct = Given::args(&args[..4]).env("BATON_THREADS", "3").run().config;
    assert_eq!(Given::args(&[]).file(&text).run().config, direct);
}

#[test]
fn a_bad_value_names_key_value_origin_and_what_is_allowed() {
    let flag = Given::args(&["--model=m", "--threads=many"]).error();
    assert!(
        flag.contains("`threads`") && flag.contains("`many`") && flag.contains("from flag"),
        "{flag}"
    );
    let env = Given::args(&["--model=m"]).env("BATON_THREADS", "65").error();
    assert!(env.contains("from environment") && env.contains("1..=64"), "{env}");
    let file = Given::args(&["--model=m"]).file("engine = \"gpu\"").error();
    assert!(
        file.contains("from file") && file.contains("cpu") && file.contains("stand-in"),
        "{file}"
    );
    let size = Given::args(&["--model=m", "--kv-cache-memory=lots"]).error();
    assert!(size.contains("512MiB"), "{size}");
    let switch = Given::args(&["--model=m"]).env("BATON_CO_LOCATED", "perhaps").error();
    assert!(switch.contains("true and false"), "{switch}");
}

#[test]
fn no_message_shows_the_password_of_an_address() {
    let address = "etcd://user:geheim@10.0.0.1:2379/prod";
    let flag = Given::args(&["--model=m", "--threads=etcd://user:geheim@10.0.0.1:2379/prod"]).error();
    assert!(flag.contains("`etcd://***@10.0.0.1:2379/prod`"), "{flag}");
    let messages = [
        flag,
        Given::args(&["--model=m", address]).error(),
        Given::args(&["--model=m"]).env("BATON_CO_LOCATED", address).error(),
        Given::args(&["--model=m"])
            .file("nickname = { a = \"etcd://user:geheim@10.0.0.1:2379/prod\" }")
            .error(),
        Given::args(&["--model=m"])
            .file("threads = 3\nnickname = etcd://user:geheim@10.0.0.1:2379/prod")
            .error(),
    ];
    for message in &messages {
        assert!(!message.contains("geheim"), "{message}");
    }
    assert!(messages[4].contains("not TOML, line 2"), "{}", messages[4]);
}

#[test]
fn unknown_keys_and_missing_keys_say_what_to_write() {
    let near = Given::args(&["--model=m"]).file("thread = 3").error();
    assert!(
        near.contains("`thread`") && near.contains("did you mean `threads`?"),
        "{near}"
    );
    let far = Given::args(&["--model=m"]).file("zzzzzzzzzzzzzzz = 3").error();
    assert!(
        far.contains("valid keys are") && far.contains("kv_cache_memory"),
        "{far}"
    );
    let nested = Given::args(&["--model=m"]).file("[threads]\na = 1").error();
    assert!(nested.contains("flat"), "{nested}");
    let own = Given::args(&["--model=m"]).file("print_config = true").error();
    assert!(own.contains("unknown key"), "{own}");
    let missing = Given::args(&[]).error();
    assert!(
        missing.contains("--model") && missing.contains("BATON_MODEL"),
        "{missing}"
    );
    let flag = Given::args(&["--model=m", "--thread=3"]).error();
    assert!(flag.contains("--thread"), "{flag}");
    let broken = Given::args(&["--model=m"]).file("= =").error();
    assert!(broken.contains("not TOML"), "{broken}");
}

#[test]
fn help_names_the_environment_and_version_prints() {
    let Ok(Outcome::Print(help)) = Given::args(&["--help"]).load() else {
        panic!("no help")
    };
    assert!(
        help.contains("[env: BATON_KV_CACHE_MEMORY]") && help.contains("Where to listen"),
        "{help}"
    );
    let Ok(Outcome::Print(version)) = Given::args(&["--version"]).load() else {
        panic!("no version")
    };
    assert!(version.contains("1.2.3"));
}

#[test]
fn how_a_process_was_started_is_a_flag_and_no_key() {
    let started = |args: &[&'static str]| Given::args(args).env("BATON_EXIT_WITH_STDIN", "true").run();
    let alone = started(&["--model=m"]);
    assert!(
        !alone.exit_with_stdin,
        "the environment is inherited: it must not make a process a child"
    );
    let child = started(&["--model=m", "--exit-with-stdin"]);
    assert!(child.exit_with_stdin);
    assert!(!child.origins.contains_key("exit_with_stdin"));
    let error = Given::args(&["--model=m"]).file("exit_with_stdin = true").error();
    assert!(error.contains("unknown key `exit_with_stdin`"), "{error}");
}
