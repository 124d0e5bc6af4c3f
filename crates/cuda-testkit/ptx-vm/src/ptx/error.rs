//! Why PTX is refused. Nothing is left out silently: what the interpreter does not know, it refuses by name.

use thiserror::Error;

use crate::types::Type;

/// The PTX has to be written without what is named here, or the interpreter has to learn it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line} of the PTX: {refusal}, in `{statement}`")]
pub struct ParseError {
    /// Of the PTX, from 1.
    pub line: u32,
    pub statement: String,
    pub refusal: Refusal,
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    #[error("the opcode `{0}` is not built")]
    Opcode(String),
    #[error("`.{0}` is not built here")]
    Modifier(String),
    #[error("the type `{0}` is not built here")]
    Type(Type),
    #[error("a modifier that the opcode needs is missing or not built: {0}")]
    Missing(&'static str),
    #[error("the operand `{0}` is not understood")]
    Operand(String),
    #[error("`{0}` is not declared, or is not built")]
    Undeclared(String),
    #[error("it has {found} operands and should have {expected}")]
    OperandCount { found: usize, expected: usize },
    #[error("the directive is not built")]
    Directive,
    #[error("a call of `{0}`: device functions have to be inlined, and printf and assert are not built")]
    Call(String),
    #[error("there is no label `{0}` here")]
    Label(String),
    #[error("the text ends or closes in the middle")]
    Unterminated,
}
