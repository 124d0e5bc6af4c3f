//! What a user declares about clusters that somebody else started: their resources, and what this program cannot see.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;
use serde_json::Value;
use service_runtime::units::ByteSize;
use workload::comparison::Resources;

use crate::exit::{Exit, WithExit};

/// How every declared value is marked in reports.
pub(super) const DECLARED: &str = "declared, not measured";
/// A file of facts has a few lines for each arm.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Facts {
    /// By the names of the arms.
    #[serde(default)]
    pub arms: BTreeMap<String, ArmFacts>,
    /// How client and servers are placed.
    pub client_placement: Option<String>,
    /// Same coordinator, tokenizer, HTTP path and policy in all arms.
    pub same_edge: Option<String>,
    /// How busy each pool was, from the user's own monitoring.
    pub pool_utilisation: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ArmFacts {
    /// Such as `1p1d`; for the report.
    pub topology: Option<String>,
    pub cores: u32,
    #[serde(default)]
    pub gpus: u32,
    /// Such as `24GiB`.
    pub memory: String,
    /// US dollars for an hour of the whole arm.
    pub price_per_hour: Option<f64>,
    /// How the arm was tuned: what was tried and what was chosen.
    pub tuned: Option<String>,
    #[serde(default)]
    pub settings: BTreeMap<String, Value>,
}

impl Facts {
    /// # Errors
    /// The file cannot be read, is no TOML, or has a key that is not known.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let read = || -> anyhow::Result<Self> {
            let length = std::fs::metadata(path)?.len();
            ensure!(
                length <= FILE_BYTES_MAX,
                "it has {length} bytes, at most {FILE_BYTES_MAX} are read"
            );
            Self::parse(&std::fs::read_to_string(path)?)
        };
        read()
            .with_context(|| format!("--facts {}", path.display()))
            .exit(Exit::Usage)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let facts: Self = toml::from_str(text)?;
        for (name, arm) in &facts.arms {
            arm.memory
                .parse::<ByteSize>()
                .with_context(|| format!("memory of the arm {name}"))?;
            let price = arm.price_per_hour.unwrap_or(0.0);
            ensure!(
                price.is_finite() && price >= 0.0,
                "price_per_hour of the arm {name} is {price}; give US dollars, 0 or more"
            );
            ensure!(
                arm.cores > 0 || arm.gpus > 0,
                "the arm {name} has neither cores nor gpus"
            );
        }
        Ok(facts)
    }

    /// # Errors
    /// The file says nothing of this arm.
    pub fn arm(&self, name: &str) -> anyhow::Result<&ArmFacts> {
        let known = || self.arms.keys().cloned().collect::<Vec<_>>().join(", ");
        self.arms
            .get(name)
            .with_context(|| format!("the file of facts has no [arms.{name}]; it has: {}", known()))
            .exit(Exit::Usage)
    }
}

impl ArmFacts {
    pub fn resources(&self) -> Resources {
        Resources {
            cores: self.cores,
            gpus: self.gpus,
            memory_bytes: self.memory_bytes(),
            price_per_hour: self.price_per_hour,
            is_measured: false,
        }
    }

    fn memory_bytes(&self) -> u64 {
        self.memory.parse().map_or(0, ByteSize::bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: &str = r#"
        client_placement = "a pod on a node of its own"
        [arms.split]
        topology = "1p1d"
        cores = 16
        gpus = 2
        memory = "24GiB"
        price_per_hour = 3.4
        tuned = "chunk budgets 256 to 1024; 512 chosen"
        settings = { max_num_seqs = 32 }
        [arms.whole]
        cores = 16
        memory = "24GiB"
    "#;

    #[test]
    fn declared_resources_are_marked_so() {
        let facts = Facts::parse(FACTS).expect("facts");
        let split = facts.arm("split").expect("it is there");
        let resources = split.resources();
        assert!(!resources.is_measured);
        assert_eq!(
            (resources.cores, resources.gpus, resources.memory_bytes),
            (16, 2, 24 << 30)
        );
        assert_eq!(split.settings["max_num_seqs"], 32);
        assert_eq!(
            facts.arm("whole").expect("it is there").resources().price_per_hour,
            None
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = Facts::parse(FACTS).expect("facts").arm("other").expect_err("unknown");
        assert!(format!("{error:#}").contains("split, whole"), "{error:#}");
        assert_eq!(crate::exit::of(&error), Exit::Usage);
        for (wrong, why) in [
            ("[arms.a]\ncores = 1\nmemory = \"much\"", "much"),
            ("[arms.a]\ncores = 1\nmemory = \"1GiB\"\nprice = 2", "price"),
            ("[arms.a]\ncores = 0\nmemory = \"1GiB\"", "neither"),
            ("[arms.a]\ncores = 1\nmemory = \"1GiB\"\nprice_per_hour = -2.0", "-2"),
        ] {
            let error = Facts::parse(wrong).expect_err(wrong);
            assert!(format!("{error:#}").contains(why), "{error:#}");
        }
        let most = "[arms.a]\ncores = 4294967295\ngpus = 4294967295\nmemory = \"1GiB\"";
        assert!(Facts::parse(most).is_ok(), "no sum of the two");
        assert!(Facts::read(Path::new("/no/such/file")).is_err());
    }
}
