//! `plan kv`: KV bytes of a token, and the time of a prompt's KV over each link.

use clap::Args;
use workload::plan::kv::{KvShape, LINKS, rate_of_gbit, transfer_s};

use super::model::{named, numbers};
use super::sheet::{Item, Sheet, Unit};

const EXAMPLES: &str = "\
Examples:
  baton plan kv --model smollm2-135m
  baton plan kv --layers 32 --kv-heads 8 --head-size 128 --prompt-tokens 512,2048,8192
  baton plan kv --layers 80 --kv-heads 8 --head-size 128 --value-bytes 1 --link-gbit 200 --efficiency 0.8";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub(super) struct KvArgs {
    /// Take the shape from these files: a path or a name.
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["layers", "kv_heads", "head_size"])]
    model: Option<String>,
    /// Layers.
    #[arg(long, value_name = "N", required_unless_present = "model", requires_all = ["kv_heads", "head_size"])]
    layers: Option<f64>,
    /// Heads for keys and values. With grouped-query attention they are fewer than the query heads.
    #[arg(long, value_name = "N", required_unless_present = "model")]
    kv_heads: Option<f64>,
    /// Numbers in one head.
    #[arg(long, value_name = "N", required_unless_present = "model")]
    head_size: Option<f64>,
    /// Bytes of a key or a value: 2 for 16-bit, 1 for 8-bit.
    #[arg(long, value_name = "BYTES", default_value_t = 2.0)]
    value_bytes: f64,
    /// Prompt lengths of the table.
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', default_values_t = [512.0, 2048.0, 8192.0, 32768.0])]
    prompt_tokens: Vec<f64>,
    /// A link of your own, in 10^9 bits a second.
    #[arg(long, value_name = "GBIT/S")]
    link_gbit: Option<f64>,
    /// Share of the line rate that transfers reach (`baton bench transfer` measures this machine).
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    efficiency: f64,
}

/// Links in the order of the table, with JSON keys.
const COLUMNS: [(&str, &str); 9] = [
    ("prompt_tokens", ">prompt"),
    ("kv_bytes", ">KV"),
    ("link_10_gbit_ms", ">10 Gb/s"),
    ("link_100_gbit_ms", ">100 Gb/s"),
    ("pcie_4_x16_ms", ">PCIe 4.0 x16"),
    ("link_400_gbit_ms", ">400 Gb/s"),
    ("pcie_5_x16_ms", ">PCIe 5.0 x16"),
    ("nvlink_4_ms", ">NVLink 4"),
    ("own_link_ms", ">your link"),
];

impl KvArgs {
    pub fn sheet(&self) -> anyhow::Result<Sheet> {
        let model = self.model.as_deref().map(numbers).transpose()?;
        let typed = |part: Option<f64>| part.unwrap_or(f64::NAN);
        let shape = KvShape {
            bytes_per_value: self.value_bytes,
            ..model.as_ref().map_or(
                KvShape {
                    layers: typed(self.layers),
                    kv_heads: typed(self.kv_heads),
                    head_size: typed(self.head_size),
                    bytes_per_value: self.value_bytes,
                },
                |model| model.kv_shape(),
            )
        };
        let each = shape.bytes_per_token()?;
        let own = self.link_gbit.map(rate_of_gbit).transpose()?;
        let rates: Vec<f64> = LINKS.iter().map(|link| link.rate).chain(own).collect();
        let mut rows = Vec::with_capacity(self.prompt_tokens.len());
        for tokens in &self.prompt_tokens {
            let bytes = tokens * each;
            let mut row = vec![
                Item::Number(*tokens, Unit::Whole("tokens")),
                Item::Number(bytes, Unit::Bytes),
            ];
            for rate in &rates {
                row.push(Item::Number(transfer_s(bytes, *rate, self.efficiency)? * 1e3, Unit::Ms));
            }
            rows.push(row);
        }
        let columns = &COLUMNS[..2 + rates.len()];
        let sheet = named(Sheet::new("kv"), model.as_ref())
            .input(("layers", "layers"), shape.layers, Unit::Of(""))
            .input(("kv_heads", "KV heads"), shape.kv_heads, Unit::Of(""))
            .input(("head_size", "head size"), shape.head_size, Unit::Of(""))
            .input(
                ("value_bytes", "bytes of a value"),
                shape.bytes_per_value,
                Unit::Of("B"),
            )
            .input(("efficiency", "share of the line rate"), self.efficiency, Unit::Percent);
        let sheet = match own {
            Some(rate) => sheet.input(("own_link_bytes_per_s", "your link"), rate, Unit::ByteRate),
            None => sheet,
        };
        Ok(sheet
            .formula("KV of a token = 2 (keys and values) x layers x KV heads x head size x bytes of a value")
            .formula("time = tokens x KV of a token / (line rate in one direction x share of it)")
            .result(("kv_bytes_per_token", "KV of a token"), each, Unit::Whole("B"))
            .table("transfer", columns, rows)
            .note("A transfer overlaps with computing the prompt; `baton plan breakeven` says how much of it is felt.")
            .note("Sliding windows are not taken off: baton keeps and moves the KV of every token."))
    }
}
